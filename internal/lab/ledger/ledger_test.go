package ledger_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/lab/ledger"
)

// A ledger that overlooks something would make every other test here worthless.
func TestLedgerTells(t *testing.T) {
	t.Parallel()
	ids := make([]uuid.UUID, 5) // 0 to 2: key a, in this order; 3: no key; 4: rolled back
	for i := range ids {
		ids[i] = uuid.New()
	}
	deeds := []ledger.Deed{{ids[0], "a", 1}, {ids[1], "a", 2}, {ids[2], "a", 3}, {ids[3], "", 0}}
	for name, c := range map[string]struct {
		arrive            []int
		excuse            []int
		told              []int // that they committed
		faults            []string
		duplicates, depth int
	}{
		"all well":                {arrive: []int{0, 3, 1, 2}},
		"lost":                    {arrive: []int{0, 1, 2}, faults: []string{"lost"}},
		"lost in a key":           {arrive: []int{0, 3, 2}, faults: []string{"out of order", "lost"}},
		"excused":                 {arrive: []int{0, 2}, excuse: []int{1, 3}},
		"out of order":            {arrive: []int{1, 0, 2, 3}, faults: []string{"out of order", "out of order"}},
		"a ghost":                 {arrive: []int{0, 1, 2, 3, 4}, faults: []string{"never committed"}},
		"repeats":                 {arrive: []int{0, 1, 0, 1, 2, 3, 0, 3}, duplicates: 4, depth: 2},
		"told of a commit, wrong": {arrive: []int{0, 1, 2, 3}, told: []int{4}, faults: []string{"a commit that was none", "a rollback"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := ledger.New()
			for _, i := range c.arrive {
				l.Deliver(ids[i], false)
			}
			for _, i := range c.excuse {
				l.Excuse(ids[i])
			}
			l.Note(false, ids[4:])
			for _, i := range c.told {
				l.Note(true, ids[i:i+1])
				l.Note(false, ids[:1])
			}
			v := l.Audit(deeds)
			if v.Duplicates != c.duplicates || v.Depth != c.depth {
				t.Errorf("%v, want %d duplicates at most %d behind", v, c.duplicates, c.depth)
			}
			if !slices.EqualFunc(v.Faults, c.faults, strings.HasPrefix) {
				t.Errorf("%q, want %q", v.Faults, c.faults)
			}
		})
	}
}
