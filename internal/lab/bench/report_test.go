package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"io"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

var rewrite = flag.Bool("update", false, "write the committed report's Markdown and plots again from its JSON")

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
	for _, one := range reasons {
		for _, beginning := range one.of {
			if !slices.ContainsFunc(r.Goals, reason{one.workload, []string{beginning}, ""}.speaksOf) {
				t.Errorf("%s has no goal %q…, of which a reason speaks", one.workload, beginning)
			}
		}
	}
	text, err := os.ReadFile(name + ".md")
	if err != nil {
		t.Fatal(err)
	}
	if string(text) != r.markdown("performance") {
		t.Error("performance.md differs from performance.json: run go test -run TestCommittedReport -update here")
	}
}

// fixed returns a contender whose runs yield these first columns.
func fixed(name string, figures ...float64) contender {
	run := -1 // the first one warms up
	return contender{name, func(context.Context, time.Duration) (sample, error) {
		run++
		return sample{figures[max(0, run-1)], math.NaN()}, nil
	}}
}

// measuredReport is that of one table, in which ours has these figures.
func measuredReport(t *testing.T, unit string, ours ...float64) *report {
	t.Helper()
	b := &bench{out: io.Discard, length: time.Millisecond, rounds: 3, workload: "outbox", report: &report{}}
	r, err := b.measure(t.Context(), table{
		title: "a table <of> figures", columns: []column{{name: unit}, {name: "none"}}, yardsticks: []string{"publish alone"},
		contenders: []contender{
			fixed("publish alone", 100, 100, 100), fixed("river, slow", 1, 1, 1), fixed("holdfast", ours...),
			fixed("holdfast, less work", 999, 999, 999), fixed("river", 40, 50, 60),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	b.atLeast(0.85, r.ratio("holdfast", "publish alone"), "of publishing alone")
	return b.report
}

func TestReportSurvivesJSON(t *testing.T) {
	t.Parallel()
	r := measuredReport(t, "messages/s", 80, 90, 85)
	data, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var again report
	if err := json.Unmarshal(data, &again); err != nil {
		t.Fatal(err)
	}
	if !math.IsNaN(again.Tables[0].Rows[0].Figures[1].median) {
		t.Errorf("a figure that there is not is %v", again.Tables[0].Rows[0].Figures[1])
	}
	if got, want := again.Tables[0].Rows[2].Ratios, r.Tables[0].Rows[2].Ratios; !reflect.DeepEqual(got, want) {
		t.Errorf("ratios %v, want %v", got, want)
	}
}

func TestStanding(t *testing.T) {
	t.Parallel()
	want := standing{Ours: "holdfast", Raw: "publish alone", Peer: "river", OverRaw: spread{0.85, 0.8, 0.9}, OverPeer: spread{1.8, 85.0 / 60, 2}}
	if got := measuredReport(t, "messages/s", 80, 90, 85).Tables[0].Summary; got != want {
		t.Errorf("by rates %+v, want %+v", got, want)
	}
	if got := measuredReport(t, "p50 ms", 80, 90, 85).Tables[0].Summary; got.Ours != "holdfast" || got.Peer != "river, slow" {
		t.Errorf("by times %q is compared with %q", got.Ours, got.Peer)
	}
}

// A workload that is measured again takes the place of what a report has of it, and no other.
func TestReportGrows(t *testing.T) {
	t.Parallel()
	one := func(workload, command string) *report {
		return &report{
			Machine: "this", Runs: []ran{{Workload: workload, Command: command}},
			Tables: []measured{{Workload: workload, Title: command}}, Goals: []kept{{Workload: workload, Text: command}},
		}
	}
	all := one("inbox", "third").beside(*one("outbox", "second").beside(*one("inbox", "first")))
	want := &report{
		Machine: "this", Runs: []ran{{Workload: "outbox", Command: "second"}, {Workload: "inbox", Command: "third"}},
		Tables: []measured{{Workload: "outbox", Title: "second"}, {Workload: "inbox", Title: "third"}},
		Goals:  []kept{{Workload: "outbox", Text: "second"}, {Workload: "inbox", Text: "third"}},
	}
	if !reflect.DeepEqual(all, want) {
		t.Errorf("%+v, want %+v", all, want)
	}
}

func TestRegressions(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		column string
		now    []float64
		worse  bool
	}{
		"as before":             {"messages/s", []float64{80, 90, 85}, false},
		"faster":                {"messages/s", []float64{160, 180, 170}, false},
		"slower":                {"messages/s", []float64{60, 61, 62}, true},
		"slower in some rounds": {"messages/s", []float64{60, 61, 85}, false},
		"later":                 {"p50 ms", []float64{100, 101, 102}, true},
		"sooner":                {"p50 ms", []float64{60, 61, 62}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var out bytes.Buffer
			err := measuredReport(t, tc.column, tc.now...).regressions(*measuredReport(t, tc.column, 80, 90, 85), &out)
			if (err != nil) != tc.worse || strings.Contains(out.String(), "worse  a table") != tc.worse {
				t.Errorf("%v, want worse: %v\n%s", err, tc.worse, out.String())
			}
		})
	}
	if err := measuredReport(t, "messages/s", 1, 1, 1).regressions(report{}, io.Discard); err == nil {
		t.Error("nothing compared is no error")
	}
}
