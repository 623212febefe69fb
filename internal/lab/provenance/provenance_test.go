package provenance

import (
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func TestHead(t *testing.T) {
	t.Parallel()
	head := Head("make sim", time.Date(2026, 11, 26, 4, 5, 0, 0, time.FixedZone("", 3600)))
	for _, want := range []string{"`make sim`", "2026-11-26 03:05 UTC", "commit ", " cores, ", runtime.GOOS + "/" + runtime.GOARCH, runtime.Version()} {
		if !strings.Contains(head, want) {
			t.Errorf("%q does not tell %q", head, want)
		}
	}
}
