package machine_test

import (
	"os"
	"runtime"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/internal/lab/machine"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func TestDescribe(t *testing.T) {
	t.Parallel()
	text := machine.Describe()
	for _, want := range []string{" cores, ", runtime.GOOS + "/" + runtime.GOARCH, runtime.Version()} {
		if !strings.Contains(text, want) {
			t.Errorf("%q does not tell %q", text, want)
		}
	}
}
