package harness

import (
	"os"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func TestLedger_findsFaults(t *testing.T) {
	t.Parallel()
	ids := make([]uuid.UUID, 4) // the last one was never committed
	for i := range ids {
		ids[i] = uuid.New()
	}
	deeds := []Deed{{ids[0], "a", 1}, {ids[1], "a", 2}, {ids[2], "b", 1}}
	for name, c := range map[string]struct {
		arrive []int
		excuse []int
		want   string // the kind of the only fault
	}{
		"all in order":               {arrive: []int{0, 1, 2}},
		"repeats":                    {arrive: []int{0, 1, 0, 2, 1}},
		"keys beside each other":     {arrive: []int{2, 0, 1}},
		"one is lost":                {arrive: []int{0, 1}, want: "lost"},
		"one is lost, and excused":   {arrive: []int{0, 1}, excuse: []int{2}},
		"the second came first":      {arrive: []int{1, 0, 2}, want: "out of order"},
		"the first is excused":       {arrive: []int{1, 2}, excuse: []int{0}},
		"one was never committed":    {arrive: []int{0, 1, 2, 3}, want: "never committed, yet delivered"},
		"that one is excused though": {arrive: []int{0, 1, 2, 3}, excuse: []int{3}},
	} {
		l := NewLedger()
		for _, i := range c.arrive {
			l.deliver(ids[i])
		}
		for _, i := range c.excuse {
			l.Excuse(ids[i])
		}
		faults := strings.Join(l.Audit(deeds).Faults, "\n")
		if (c.want == "") != (faults == "") || !strings.HasPrefix(faults, c.want) {
			t.Errorf("%s: %q, want %q", name, faults, c.want)
		}
	}
}
