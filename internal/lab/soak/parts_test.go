package main

import (
	"context"
	"errors"
	"flag"
	"io"
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
	for _, args := range [][]string{{"-part=other"}, {"shop"}, {"-clients=-1"}, {"-messages=1"}, {"-secs=-1"}, {"-minutes=-1"}, {"-part=all", "-json=report.json"}} {
		if err := run(t.Context(), args, os.Stderr); err == nil {
			t.Errorf("%v are taken", args)
		}
	}
}

func TestChosen(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{"all": "shop waiting snapshot dedup", "dedup": "dedup", "other": ""} {
		var names []string
		for _, p := range chosen(name) {
			names = append(names, p.name)
		}
		if got := strings.Join(names, " "); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
}

// All parts are run, also behind one that fails and one that finds what is not so. A part that ends has its section at once.
func TestRunParts(t *testing.T) {
	t.Parallel()
	doc := filepath.Join(t.TempDir(), "report.md")
	broken := errors.New("broken")
	finds := func(ok bool) func(context.Context, sizes, *report) error {
		return func(_ context.Context, s sizes, r *report) error {
			r.find(ok, "%v minutes, %d clients, %v s", s.minutes, s.clients, s.secs)
			return nil
		}
	}
	some := []part{
		{"shop", func(context.Context, sizes, *report) error { return broken }, 0, 0, 0},
		{"waiting", finds(false), 1, 2, 3},
		{"snapshot", func(context.Context, sizes, *report) error {
			if text, err := os.ReadFile(doc); err != nil || !strings.Contains(string(text), "1 minutes, 7 clients, 3 s") {
				t.Errorf("before the next part: %s (%v)", text, err)
			}
			return nil
		}, 0, 0, 0},
		{"dedup", finds(true), 4, 5, 6},
	}
	flags := flag.NewFlagSet("soak", flag.ContinueOnError)
	clients := flags.Int("clients", 0, "")
	flags.String("part", "", "")
	if err := flags.Parse([]string{"-part=all", "-clients=7"}); err != nil {
		t.Fatal(err)
	}
	err := runParts(t.Context(), some, sizes{clients: *clients}, flags, paths{markdown: doc}, io.Discard)
	if !errors.Is(err, broken) || !errors.Is(err, errNotSo) {
		t.Errorf("run: %v, want both %v and %v", err, broken, errNotSo)
	}
	text, err := os.ReadFile(doc)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"| NOT SO | 1 minutes", "## snapshot", "| ok | 4 minutes, 7 clients, 6 s |", "    go run ./internal/lab/soak -part=dedup -clients=7\n"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	stops := part{"shop", func(context.Context, sizes, *report) error { cancel(); return ctx.Err() }, 0, 0, 0}
	late := part{"dedup", func(context.Context, sizes, *report) error { t.Error("a part is run after the end"); return nil }, 0, 0, 0}
	if err := runParts(ctx, []part{stops, late}, sizes{}, flags, paths{}, io.Discard); !errors.Is(err, context.Canceled) {
		t.Errorf("run: %v, want %v", err, context.Canceled)
	}
}
