package ratelimitredis_test

import (
	"log/slog"
	"maps"
	"math"
	"slices"
	"testing"

	"github.com/holdfast-go/holdfast/internal/metrictest"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
)

// wantRecorded compares everything recorded since the last call; of durations, how many there are.
func wantRecorded(t *testing.T, r *metrictest.Recorder, when string, durations int, want map[string][]float64) {
	t.Helper()
	const duration = "holdfast.ratelimit.duration"
	recorded := r.Take()
	if n := len(recorded[duration]); n != durations {
		t.Errorf("%s: recorded %d durations, want %d", when, n, durations)
	}
	delete(recorded, duration)
	rounded := func(got, want float64) bool { return math.Round(10*got) == 10*want }
	if !maps.EqualFunc(recorded, want, func(got, want []float64) bool { return slices.EqualFunc(got, want, rounded) }) {
		t.Errorf("%s: recorded %v, want %v", when, recorded, want)
	}
}

// Decisions are counted by outcome, source and the limit that bound.
func TestMetrics(t *testing.T) {
	t.Parallel()
	proxy := testenv.NewProxy(t, redistest.URL(t))
	meter := &metrictest.Recorder{}
	client := redistest.Client(t, proxy.URL())
	configure := func(failOpen bool) ratelimitredis.Config {
		return ratelimitredis.Config{FailOpen: failOpen, MeterProvider: meter, Logger: slog.New(slog.DiscardHandler)}
	}
	allow, deny := open(t, client, configure(true)), open(t, client, configure(false))
	testenv.Eventually(t, func() error { return client.Ping(t.Context()).Err() })
	charges := []ratelimit.Charge{
		{Limit: ratelimit.Limit{Name: "user", Max: 2, Window: day}, Key: "ann"},
		{Limit: ratelimit.Limit{Name: "global", Max: 10, Window: day}},
	}
	ask := func(l *ratelimitredis.Limiter, charges ...ratelimit.Charge) { _, _ = l.Allow(t.Context(), charges...) }

	const decisions, remaining = "holdfast.ratelimit.decisions", "holdfast.ratelimit.remaining"
	ask(allow, charges...)
	wantRecorded(t, meter, "allowed", 1, map[string][]float64{
		decisions + "{limit=user,outcome=allowed,source=store}": {1}, remaining + "{limit=user}": {0.5},
	})
	ask(allow, charges[1])
	ask(allow, charges...)
	ask(allow, charges...)
	wantRecorded(t, meter, "denied", 3, map[string][]float64{
		decisions + "{limit=global,outcome=allowed,source=store}": {1}, remaining + "{limit=global}": {0.8},
		decisions + "{limit=user,outcome=allowed,source=store}": {1}, decisions + "{limit=user,outcome=denied,source=store}": {1},
		remaining + "{limit=user}": {0, 0},
	})
	ask(allow, charges...)
	wantRecorded(t, meter, "remembered", 0, map[string][]float64{decisions + "{limit=user,outcome=denied,source=cache}": {1}})

	proxy.Cut()
	ask(allow, charges[1])
	wantRecorded(t, meter, "without Redis", 1, map[string][]float64{decisions + "{limit=,outcome=allowed,source=fallback}": {1}})
	ask(deny, charges[1])
	wantRecorded(t, meter, "undecided", 1, map[string][]float64{decisions + "{limit=,outcome=unavailable,source=none}": {1}})
}
