package main

import (
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var rewrite = flag.Bool("update", false, "write the committed report's Markdown and plots again from its JSON")

// The committed report says why each goal that it misses is missed, and its Markdown is that of its JSON.
func TestCommittedReport(t *testing.T) {
	t.Parallel()
	name := filepath.Join("..", "performance")
	r, err := readReport(name + ".json")
	if err != nil {
		t.Fatal(err)
	}
	if *rewrite {
		if err := r.save(name); err != nil {
			t.Fatal(err)
		}
	}
	planted := content(t, filepath.Join("..", "planted", "report.md"))
	for _, g := range r.Goals {
		if !g.Met && reasonOf(g) < 0 {
			t.Errorf("%s: no reason why %q is missed", g.Workload, g.Text)
		}
	}
	for _, one := range reasons {
		for _, beginning := range one.of {
			if !slices.ContainsFunc(r.Goals, reason{one.workload, []string{beginning}, ""}.speaksOf) {
				t.Errorf("%s has no goal %q…, of which a reason speaks", one.workload, beginning)
			}
		}
	}
	rows := quotedNames(r)
	for _, one := range reasons {
		for _, quoted := range regexp.MustCompile("`[^`]+`").FindAllString(one.why, -1) {
			if name := strings.Trim(quoted, "`"); !rows[name] && !strings.Contains(planted, "| "+name+" |") {
				t.Errorf("%s: a reason speaks of %s, which no table has", one.workload, quoted)
			}
		}
	}
	if content(t, name+".md") != r.markdown("performance") {
		t.Error("performance.md is not what performance.json says: run go test ./internal/lab/bench -run TestCommittedReport -update")
	}
}

// quotedNames are those of rows and columns.
func quotedNames(r report) map[string]bool {
	names := map[string]bool{}
	for _, t := range r.Tables {
		for _, column := range t.Columns {
			names[column] = true
		}
		for _, row := range t.Rows {
			names[row.Name] = true
		}
	}
	return names
}

func content(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// A reason is told once, under the number that its missed goals have. A goal that is met needs none.
func TestReasonsInReport(t *testing.T) {
	r := report{Goals: []kept{
		{Workload: "outbox", Text: "of publish alone", Got: exactly(1), Bound: 0.8, AtLeast: true, Met: true},
		{Workload: "outbox", Text: "of unkeyed, 10 keys", Got: exactly(0.2), Bound: 0.6, AtLeast: true},
		{Workload: "outbox", Text: "of publish alone, quorum", Got: exactly(0.7), Bound: 0.8, AtLeast: true},
		{Workload: "outbox", Text: "of unkeyed, 1 key", Got: exactly(0.1), Bound: 0.6, AtLeast: true},
	}}
	before := reasons
	defer func() { reasons = before }()
	reasons = []reason{{"outbox", []string{"of publish"}, "publishing is the bound."}, {"outbox", []string{"of unkeyed"}, "a key waits."}}
	want := `
| met | outbox | of publish alone | ≥ 0.8 | 1 |  |
| missed | outbox | of unkeyed, 10 keys | ≥ 0.6 | 0.20 | (1) |
| missed | outbox | of publish alone, quorum | ≥ 0.8 | 0.70 | (2) |
| missed | outbox | of unkeyed, 1 key | ≥ 0.6 | 0.10 | (1) |

Why goals are missed:

1. outbox: a key waits.
2. outbox: publishing is the bound.
`
	if text := r.markdown("x"); !strings.Contains(text, want) {
		t.Errorf("no %s\nin:\n%s", want, text)
	}
}
