package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestSpread(t *testing.T) {
	t.Parallel()
	tests := []struct {
		figures []float64
		want    spread
	}{
		{[]float64{7}, spread{7, 7, 7}},
		{[]float64{9, 1, 5}, spread{5, 1, 9}},
		{[]float64{4, 1, 2, 9}, spread{3, 1, 9}},
	}
	for _, tt := range tests {
		if got := spreadOf(tt.figures); got != tt.want {
			t.Errorf("spreadOf(%v) = %v, want %v", tt.figures, got, tt.want)
		}
	}
}

// scripted returns a contender that yields these first columns, the warm-up's first.
func scripted(name string, log *[]string, figures ...float64) contender {
	return contender{name, func(context.Context, time.Duration) (sample, error) {
		*log = append(*log, name)
		s := sample{figures[0], 0.5 * figures[0], math.NaN()}
		figures = figures[1:]
		return s, nil
	}}
}

func TestMeasureAlternatesAndPrints(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	var log []string
	b := &bench{out: &out, length: time.Millisecond, rounds: 3}
	r, err := b.measure(t.Context(), table{
		title:   "a table",
		columns: []column{{name: "tx/s"}, {name: "worst ms", decimals: 1, most: true}, {name: "none"}},
		prepare: func(context.Context) error {
			log = append(log, "-")
			return nil
		},
		contenders: []contender{scripted("raw", &log, 1, 100, 200, 400), scripted("ours", &log, 1, 50, 180, 200)},
		yardsticks: []string{"raw"},
	})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := strings.Join(log, " "), strings.TrimSuffix(strings.Repeat("- raw - ours ", 4), " "); got != want {
		t.Errorf("order of runs: %s, want %s", got, want)
	}
	if got, want := r.ratio("ours", "raw"), (spread{0.5, 0.5, 0.9}); got != want {
		t.Errorf("ratio = %v, want %v: the median of the ratios within a round", got, want)
	}
	want := `
a table
        tx/s  [min .. max]  x raw  worst ms  none
  raw    200  [100 .. 400]   1.00     200.0     -
  ours   180   [50 .. 200]   0.50     100.0     -
`
	if got := out.String(); got != want {
		t.Errorf("printed\n%s\nwant\n%s", got, want)
	}
}

func TestMeasureStopsAtAnError(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	b := &bench{out: &bytes.Buffer{}, length: time.Millisecond, rounds: 1}
	_, err := b.measure(t.Context(), table{title: "a table", columns: []column{{name: "tx/s"}}, contenders: []contender{
		{"ours", func(context.Context, time.Duration) (sample, error) { return nil, broken }},
	}})
	if !errors.Is(err, broken) || !strings.Contains(err.Error(), "a table: ours") {
		t.Errorf("measure: %v, want the error with table and contender", err)
	}
}

func TestGoals(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	b := &bench{out: &out}
	b.atLeast(0.97, spread{0.98, 0.9, 1}, "fast")
	b.atLeast(0.97, spread{0.96, 0.9, 1}, "slow")
	b.atMost(3, exactly(3), "lean")
	b.atMost(3, exactly(4), "fat")
	if err := b.printGoals(); err != nil {
		t.Fatal(err)
	}
	var got []string
	for line := range strings.Lines(out.String()) {
		if f := strings.Fields(line); len(f) > 2 {
			got = append(got, fmt.Sprint(f[len(f)-1], " ", f[0]))
		}
	}
	if want := []string{"fast met", "slow missed", "lean met", "fat missed"}; !slices.Equal(got, want) {
		t.Errorf("goals: %q, want %q", got, want)
	}
}

func TestArguments(t *testing.T) {
	t.Parallel()
	tests := []struct{ args, want string }{
		{"", "name one workload of: all, txretry"},
		{"txrety", "name one workload"},
		{"txretry outbox", "name one workload"},
		{"txretry -part x", "no part"},
		{"txretry -rounds 0", "must be positive"},
		{"-secs -1 txretry", "must be positive"},
		{"outbox -messages 0", "must be positive"},
		{"txretry -what", "not defined"},
		{"all -part x", "has no parts"},
		{"txretry -previous=/none.json", "none.json"},
	}
	for _, tt := range tests {
		err := run(t.Context(), strings.Fields(tt.args), &bytes.Buffer{})
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("bench %s: %v, want an error with %q", tt.args, err, tt.want)
		}
	}
}
