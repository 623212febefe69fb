package ratelimitredis_test

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"testing"
	"time"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
)

// recorder is a MeterProvider that counts what is recorded, by instrument and
// labels.
type recorder struct {
	noop.MeterProvider
	mu sync.Mutex
	by map[string]int64
}

func (r *recorder) Meter(string, ...metric.MeterOption) metric.Meter { return recordingMeter{r: r} }

type recordingMeter struct {
	noop.Meter
	r *recorder
}

func (m recordingMeter) Int64Counter(name string, _ ...metric.Int64CounterOption) (metric.Int64Counter, error) {
	return recordingCounter{r: m.r, name: name}, nil
}

func (m recordingMeter) Float64Histogram(name string, _ ...metric.Float64HistogramOption) (metric.Float64Histogram, error) {
	return recordingHistogram{r: m.r, name: name}, nil
}

type recordingCounter struct {
	noop.Int64Counter
	r    *recorder
	name string
}

func (c recordingCounter) Add(_ context.Context, incr int64, opts ...metric.AddOption) {
	set := metric.NewAddConfig(opts).Attributes()
	limit, _ := set.Value("limit")
	outcome, _ := set.Value("outcome")
	source, _ := set.Value("source")
	c.r.add(fmt.Sprintf("%s %s/%s/%s", c.name, limit.AsString(), outcome.AsString(), source.AsString()), incr)
}

type recordingHistogram struct {
	noop.Float64Histogram
	r    *recorder
	name string
}

func (h recordingHistogram) Record(_ context.Context, value float64, opts ...metric.RecordOption) {
	set := metric.NewRecordConfig(opts).Attributes()
	if limit, ok := set.Value("limit"); ok {
		h.r.add(fmt.Sprintf("%s %s=%.1f", h.name, limit.AsString(), value), 1)
		return
	}
	h.r.add(h.name, 1)
}

func (r *recorder) add(what string, n int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.by[what] += n
}

// want compares everything recorded since the last call.
func (r *recorder) want(t *testing.T, when string, want map[string]int64) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	if !maps.Equal(r.by, want) {
		t.Errorf("%s: recorded %v, want %v", when, r.by, want)
	}
	r.by = map[string]int64{}
}

// Decisions are counted by outcome, source and the limit that bound; hooks see
// the same.
func TestMetricsAndHooks(t *testing.T) {
	t.Parallel()
	proxy := testenv.NewProxy(t, redistest.URL(t))
	meter := &recorder{by: map[string]int64{}}
	var seen []string
	hooks := ratelimitredis.Hooks{
		OnDecision: func(_ context.Context, d ratelimit.Decision, took time.Duration) {
			seen = append(seen, fmt.Sprintf("allowed=%v denied=%q cached=%v fallback=%v timed=%v", d.Allowed, d.Denied, d.Cached, d.Fallback, took > 0))
		},
		OnUnavailable: func(context.Context, error) { seen = append(seen, "unavailable") },
	}
	client := redistest.Client(t, proxy.URL())
	configure := func(p ratelimitredis.Policy) ratelimitredis.Config {
		return ratelimitredis.Config{Timeout: 300 * time.Millisecond, OnUnavailable: p, MeterProvider: meter, Hooks: hooks, Logger: slog.New(slog.DiscardHandler)}
	}
	allow, deny := open(t, client, configure(ratelimitredis.Allow)), open(t, client, configure(ratelimitredis.Deny))
	testenv.Eventually(t, patient, func() error { return client.Ping(t.Context()).Err() })
	charges := []ratelimit.Charge{
		{Limit: ratelimit.Limit{Name: "user", Max: 2, Window: day}, Key: "ann"},
		{Limit: ratelimit.Limit{Name: "global", Max: 10, Window: day}},
	}
	ask := func(l *ratelimitredis.Limiter, charges ...ratelimit.Charge) { _, _ = l.Allow(t.Context(), charges...) }

	ask(allow, charges...)
	meter.want(t, "allowed", map[string]int64{
		"holdfast.ratelimit.decisions user/allowed/store": 1, "holdfast.ratelimit.remaining user=0.5": 1, "holdfast.ratelimit.duration": 1,
	})
	ask(allow, charges[1])
	ask(allow, charges...)
	ask(allow, charges...)
	meter.want(t, "denied", map[string]int64{
		"holdfast.ratelimit.decisions global/allowed/store": 1, "holdfast.ratelimit.remaining global=0.8": 1, "holdfast.ratelimit.duration": 3,
		"holdfast.ratelimit.decisions user/allowed/store": 1, "holdfast.ratelimit.decisions user/denied/store": 1, "holdfast.ratelimit.remaining user=0.0": 2,
	})
	ask(allow, charges...)
	meter.want(t, "remembered", map[string]int64{"holdfast.ratelimit.decisions user/denied/cache": 1})

	proxy.Pause()
	ask(allow, charges[1])
	meter.want(t, "by the policy", map[string]int64{"holdfast.ratelimit.decisions /allowed/policy": 1, "holdfast.ratelimit.duration": 1})
	ask(deny, charges[1])
	meter.want(t, "undecided", map[string]int64{"holdfast.ratelimit.decisions /unavailable/none": 1, "holdfast.ratelimit.duration": 1})

	stored := func(denied string) string {
		return fmt.Sprintf("allowed=%v denied=%q cached=false fallback=false timed=true", denied == "", denied)
	}
	want := []string{
		stored(""), stored(""), stored(""), stored("user"),
		`allowed=false denied="user" cached=true fallback=false timed=false`,
		"unavailable", `allowed=true denied="" cached=false fallback=true timed=true`,
		"unavailable",
	}
	if fmt.Sprint(seen) != fmt.Sprint(want) {
		t.Errorf("the hooks saw %q, want %q", seen, want)
	}
}
