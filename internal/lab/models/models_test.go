package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/trace/keys"
	"github.com/holdfast-go/holdfast/internal/trace/lanes"
	"github.com/holdfast-go/holdfast/internal/trace/parked"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// TestModels checks all models and mutants. Tier 2 does not install the programs that it needs.
func TestModels(t *testing.T) {
	t.Parallel()
	if missing := missingProgram(); missing != "" {
		t.Skipf("%s is not installed: apt-get install spin gcc", missing)
	}
	testenv.AllowPrivate(t) // half a minute of two CPUs is too much for tier 1
	models := all(t)
	if os.Getenv(testenv.NightlyVar) != "1" {
		for _, m := range models { // the mutants take most of the time, because each is compiled
			for i := range m.properties {
				p := &m.properties[i]
				p.mutants = p.mutants[:1]
			}
		}
	}
	rows, err := checkAll(t.Context(), models)
	t.Log("\n" + table(rows))
	if err != nil {
		t.Error(err)
	}
}

func all(t *testing.T) []model {
	t.Helper()
	models, err := readModels("")
	if err != nil {
		t.Fatal(err)
	}
	return models
}

const (
	maxLines    = 150
	minMutants  = 3
	mutantStart = "MUTANT_"
)

var (
	condition  = regexp.MustCompile(`(?m)^#(?:ifn?def|(?:el)?if defined) ?.*$`)
	mutantName = regexp.MustCompile(`MUTANT_\d+`)
	sourceFile = regexp.MustCompile(`\b[a-z0-9_]+\.(?:go|sql|lua|pml)\b`)
)

// TestModels_shape checks the head comments: each mutant is described and planted, and each named file exists.
func TestModels_shape(t *testing.T) {
	t.Parallel()
	known := map[string]bool{}
	err := filepath.WalkDir("../../..", func(path string, _ fs.DirEntry, err error) error {
		known[filepath.Base(path)] = true
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range all(t) {
		if n := strings.Count(m.text, "\n"); n > maxLines {
			t.Errorf("%s has %d lines, at most %d may be", m.name, n, maxLines)
		}
		head, _, _ := strings.Cut(m.text, "*/")
		for _, name := range sourceFile.FindAllString(head, -1) {
			if !known[name] {
				t.Errorf("%s names %s, which does not exist", m.name, name)
			}
		}
		for _, text := range []string{" * Abstracts", " * Leaves out:"} {
			if !strings.Contains(head, text) {
				t.Errorf("the head of %s has no line %q", m.name, text)
			}
		}
		var described, planted []string
		for _, p := range m.properties {
			if len(p.mutants) == 0 {
				t.Errorf("%s has no mutant for %s", m.name, p.kind)
			}
			for _, found := range p.mutants {
				described = append(described, found.define)
			}
		}
		for _, line := range condition.FindAllString(m.text, -1) {
			planted = append(planted, mutantName.FindAllString(line, -1)...)
		}
		slices.Sort(planted)
		slices.Sort(described)
		if planted = slices.Compact(planted); !slices.Equal(planted, described) || len(planted) < minMutants {
			t.Errorf("%s describes the mutants %v, and has %v", m.name, described, planted)
		}
		if n := strings.Count(head, mutantStart); n != len(described) {
			t.Errorf("the head of %s has %d mutants, %d could be read", m.name, n, len(described))
		}
	}
}

var transition = regexp.MustCompile(`@([a-z]+)`)

// TestModels_transitions: the acceptors of package trace have the transitions of their models.
func TestModels_transitions(t *testing.T) {
	t.Parallel()
	accepted := map[string][]string{"keys": keys.Transitions, "lanes": lanes.Transitions, "parked": parked.Transitions}
	for _, m := range all(t) {
		var named []string
		for _, found := range transition.FindAllStringSubmatch(m.text, -1) {
			named = append(named, found[1])
		}
		slices.Sort(named)
		want := slices.Sorted(slices.Values(accepted[m.name]))
		if named = slices.Compact(named); !slices.Equal(named, want) {
			t.Errorf("%s has the transitions %v, its acceptor %v", m.name, named, want)
		}
	}
}

// A search that left out states is an error, and not a success.
func TestResultOf(t *testing.T) {
	t.Parallel()
	const sound = "State-vector 80 byte, depth reached 54, errors: 0\n   119214 states, stored\n"
	for text, want := range map[string]struct {
		search
		bad bool
	}{
		sound: {search: search{states: 119214, depth: 54}},
		"error: max search depth too small\n" + sound:       {bad: true},
		"pan: reached -DMEMLIM bound\n" + sound:             {bad: true},
		"Warning: Search not completed\n" + sound:           {bad: true},
		sound + "\tmodel.pml:7, state 9, \"x = 1\"\n":       {bad: true},
		sound + "\tmodel.pml:7, state 9, \"-end-\"\n":       {search: search{states: 119214, depth: 54}},
		"pan:1: invalid end state (at depth 3)\n" + sound:   {bad: true},
		"depth reached 1, errors: 1\n   5 states, stored\n": {bad: true},
		"": {bad: true},
		"pan:1: invalid end state (at depth 3)\nWarning: Search not completed\ndepth reached 9, errors: 1\n  7 states, stored\n": {
			search: search{states: 7, depth: 9, fault: "invalid end state (at depth 3)"},
		},
	} {
		got, err := resultOf(text)
		if (err != nil) != want.bad || got != want.search {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
}
