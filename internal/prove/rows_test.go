package prove

import (
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// Equal rows may occur several times. A message shows only some of many differences.
func TestDifferences(t *testing.T) {
	t.Parallel()
	of := func(values ...[]string) rows {
		return rows{{query: "TABLE seats", columns: []string{"id", "state"}, values: values}}
	}
	clean := of([]string{"1", "free"}, []string{"2", "held"}, []string{"2", "held"})
	if !clean.equal(clean) || clean.equal(of()) {
		t.Error("rows are not equal to themselves alone")
	}
	got := of([]string{"1", "free"}, []string{"2", "held"}, []string{"3", "held"}).differences(clean)
	want := "\n    TABLE seats\n      - id=2 state=held\n      + id=3 state=held"
	if got != want {
		t.Errorf("%q, want %q", got, want)
	}
	changed := of([]string{"1", "free"}, []string{"2", "sold"}, []string{"2", "held"})
	if columns := changed.changing(clean); !slices.Equal(columns, []string{"state"}) {
		t.Errorf("columns %q, want state", columns)
	}
	var many [][]string
	for i := range maxDifferences + 3 {
		many = append(many, []string{strconv.Itoa(i + 10), "held"})
	}
	got = of(many...).differences(of())
	if !strings.HasSuffix(got, "and 3 more") || strings.Count(got, "+ id=") != maxDifferences {
		t.Errorf("not bounded:%s", got)
	}
}

// A step is described in one line, without the settings that travel with BEGIN.
func TestBrief(t *testing.T) {
	t.Parallel()
	for want, sql := range map[string][]string{
		"begin; INSERT INTO seats VALUES ($1)": {"begin", "SET LOCAL lock_timeout = 1", "INSERT INTO seats\n\t\tVALUES ($1)"},
		"set local role app":                   {"set local role app"},
		strings.Repeat("é", maxBrief) + "…":    {strings.Repeat("é", maxBrief+1)},
	} {
		if got := brief(sql); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
