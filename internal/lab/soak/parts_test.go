package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// Each part that is not the shop runs to its end in its smallest form. What it measures in so short a time says nothing.
func TestPartsInSmall(t *testing.T) {
	t.Parallel()
	for part, rows := range map[string][]string{
		"waiting":  {"| relay, 100000 wait |", "| relay, all the rest | ", "The heap of the relay"},
		"snapshot": {"| before |", "| snapshot of 0s |", "| after |"},
		"dedup":    {"| first time, no entries |", "| copy, 10000 entries |", "| prune, 10000 entries |"},
	} {
		t.Run(part, func(t *testing.T) {
			t.Parallel()
			doc := filepath.Join(t.TempDir(), "report.md")
			var out strings.Builder
			err := run(t.Context(), []string{
				"-part=" + part, "-messages=100000", "-rows=10000", "-clients=2", "-secs=3", "-minutes=0.25", "-markdown=" + doc,
			}, &out)
			if errors.Is(err, testenv.ErrNotInstalled) {
				testenv.Missing(t, err.Error())
			}
			if err != nil && !errors.Is(err, errNotSo) {
				t.Fatal(err)
			}
			text, err := os.ReadFile(doc)
			if err != nil {
				t.Fatal(err)
			}
			for _, row := range rows {
				if !strings.Contains(string(text), row) {
					t.Errorf("no %q in\n%s", row, text)
				}
			}
			if strings.Contains(string(text), "NaN") || !strings.Contains(out.String(), part) {
				t.Errorf("%s\n%s", text, &out)
			}
		})
	}
}

func TestFlags(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"-part=other"}, {"shop"}, {"-clients=0"}, {"-messages=1"}, {"-secs=0"}, {"-minutes=-1"}} {
		if err := run(t.Context(), args, os.Stderr); err == nil {
			t.Errorf("%v are taken", args)
		}
	}
}
