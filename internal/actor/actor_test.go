package actor

import (
	"os"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestCheck(t *testing.T) {
	t.Parallel()
	for _, good := range [][2]string{{"ada", ""}, {strings.Repeat("a", 128), strings.Repeat("ü", 500)}} {
		if err := Check("by", "reason", good[0], good[1]); err != nil {
			t.Errorf("%.20q, %.20q: %v", good[0], good[1], err)
		}
	}
	for want, wrong := range map[string][2]string{
		"by wants 1 to 128":              {"", ""},
		"by wants 1 to 128 bytes":        {strings.Repeat("a", 129), ""},
		"reason wants at most 1000":      {"ada", strings.Repeat("x", 1001)},
		"characters\nreason wants":       {"a\x7f", "a\nb"},
		"by wants 1 to 128 bytes of UTF": {"\xff", ""},
	} {
		if err := Check("by", "reason", wrong[0], wrong[1]); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.20q, %.20q: %v, want %q", wrong[0], wrong[1], err, want)
		}
	}
}

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }
