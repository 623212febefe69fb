package testenv_test

import (
	"fmt"
	"net"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestPortsAreGivenOnce(t *testing.T) {
	t.Parallel()
	port, err := testenv.FreePort()
	must(t, err)
	if testenv.Reserve(port) {
		t.Errorf("port %d was given twice", port)
	}
	l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	must(t, err)
	must(t, l.Close())
}
