package conformance

import (
	"os"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// A store that ignores the start position of a list fails the suite, and does not hang it.
func TestPagesEnd(t *testing.T) {
	asked := 0
	got, err := inPages(23, func(limit int, _ string) ([]listed, error) {
		if asked++; asked > 10 {
			t.Fatal("asked for page after page")
		}
		return make([]listed, limit), nil
	})
	if err != nil || len(got) <= 23 {
		t.Errorf("%d entries, %v; want more than there are", len(got), err)
	}
}
