package main

import (
	"flag"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

var rewrite = flag.Bool("update", false, "write the committed report's Markdown again from its JSON")

// The committed report has a reason for each missed goal, and its Markdown matches its JSON.
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
	for _, g := range r.Goals {
		if !g.Met && reasonOf(g) < 0 {
			t.Errorf("%s: no reason why %q is missed", g.Workload, g.Text)
		}
	}
	for _, h := range headlines {
		if _, ok := r.table(h.title); !ok {
			t.Errorf("no table %q for the summary", h.title)
		}
	}
	for _, one := range reasons {
		for _, beginning := range one.of {
			if !slices.ContainsFunc(r.Goals, reason{one.workload, []string{beginning}, ""}.speaksOf) {
				t.Errorf("%s has no goal %q…, but a reason for it", one.workload, beginning)
			}
		}
	}
	text, err := os.ReadFile(name + ".md")
	if err != nil {
		t.Fatal(err)
	}
	chart, err := os.ReadFile(name + ".svg")
	if err != nil {
		t.Fatal(err)
	}
	if string(text) != r.markdown() || string(chart) != r.chart() {
		t.Error("performance.md differs from performance.json: run go test -run TestCommittedReport -update here")
	}
}
