package ratelimitredis

import (
	"context"
	"errors"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/holdfast-go/holdfast/internal/telemetry"
	"github.com/holdfast-go/holdfast/ratelimit"
)

const scope = "github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"

// maxLabels bounds the limits whose labels are kept ready.
const maxLabels = 1000

// meters are the instruments.
type meters struct {
	decisions metric.Int64Counter
	duration  metric.Float64Histogram
	remaining metric.Float64Histogram
	drift     metric.Int64Counter

	// labels by limit are made once, since a remembered denial is to cost little. Readers take no lock:
	// who adds a limit replaces the map.
	labels  atomic.Pointer[map[string]*labels]
	growing sync.Mutex
}

// labels are those of one limit.
type labels struct {
	allowed, denied bySource
	remaining       []metric.RecordOption
}

// bySource are the labels of a decision by who made it.
type bySource struct{ store, cache, fallback []metric.AddOption }

func newMeters(provider metric.MeterProvider) (*meters, error) {
	meter := telemetry.New(scope, nil, provider).Meter
	m := &meters{}
	m.labels.Store(&map[string]*labels{})
	var errs [4]error
	m.decisions, errs[0] = meter.Int64Counter("holdfast.ratelimit.decisions",
		metric.WithDescription("Decisions by outcome, by who decided, and by the limit that was nearest to its end."), metric.WithUnit("{decision}"))
	m.duration, errs[1] = meter.Float64Histogram("holdfast.ratelimit.duration",
		metric.WithDescription("Duration of a decision that was not remembered, or of the attempt."), metric.WithUnit("s"), telemetry.Seconds)
	m.remaining, errs[2] = meter.Float64Histogram("holdfast.ratelimit.remaining",
		metric.WithDescription("Share that is left of the limit that was nearest to its end."), metric.WithUnit("1"),
		metric.WithExplicitBucketBoundaries(0, 0.05, 0.1, 0.2, 0.5, 0.8))
	m.drift, errs[3] = meter.Int64Counter("holdfast.ratelimit.drift",
		metric.WithDescription("Questions asked again because the server was in another window."), metric.WithUnit("{question}"))
	return m, errors.Join(errs[:]...)
}

// decided counts a decision, and records the share that is left of the limit nearest to its end.
func (m *meters) decided(ctx context.Context, d *ratelimit.Decision) {
	limit, share := d.Denied, 0.0
	if limit == "" {
		if s, ok := d.Binding(); ok {
			limit, share = s.Name, float64(s.Remaining)/float64(s.Capacity)
		}
	}
	of := m.of(limit)
	m.decisions.Add(ctx, 1, of.decision(d)...)
	if limit != "" && !d.Cached {
		m.remaining.Record(ctx, share, of.remaining...)
	}
}

// unavailable counts a request that got no decision.
func (m *meters) unavailable(ctx context.Context) {
	m.decisions.Add(ctx, 1, decisionLabels("", "unavailable", "none")...)
}

func (m *meters) took(ctx context.Context, d time.Duration) { m.duration.Record(ctx, d.Seconds()) }

// of returns the labels of a limit.
func (m *meters) of(limit string) *labels {
	if known := (*m.labels.Load())[limit]; known != nil {
		return known
	}
	m.growing.Lock()
	defer m.growing.Unlock()
	known := *m.labels.Load()
	if known[limit] != nil {
		return known[limit]
	}
	made := newLabels(limit)
	if len(known) < maxLabels {
		more := maps.Clone(known)
		more[limit] = made
		m.labels.Store(&more)
	}
	return made
}

func newLabels(limit string) *labels {
	by := func(outcome string) bySource {
		return bySource{
			store:    decisionLabels(limit, outcome, "store"),
			cache:    decisionLabels(limit, outcome, "cache"),
			fallback: decisionLabels(limit, outcome, "fallback"),
		}
	}
	name := attribute.NewSet(attribute.String("limit", limit))
	return &labels{allowed: by("allowed"), denied: by("denied"), remaining: []metric.RecordOption{metric.WithAttributeSet(name)}}
}

func decisionLabels(limit, outcome, source string) []metric.AddOption {
	return []metric.AddOption{metric.WithAttributeSet(attribute.NewSet(
		attribute.String("limit", limit), attribute.String("outcome", outcome), attribute.String("source", source)))}
}

// decision returns the labels of a decision.
func (l *labels) decision(d *ratelimit.Decision) []metric.AddOption {
	by := &l.denied
	if d.Allowed {
		by = &l.allowed
	}
	switch {
	case d.Cached:
		return by.cache
	case d.Fallback:
		return by.fallback
	}
	return by.store
}
