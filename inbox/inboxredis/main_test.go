package inboxredis_test

import (
	"flag"
	"os"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// The tests wait for servers that are silent more than they compute, so eight run at once.
func TestMain(m *testing.M) {
	if err := flag.Set("test.parallel", "8"); err != nil {
		panic(err)
	}
	os.Exit(testenv.Run(m))
}
