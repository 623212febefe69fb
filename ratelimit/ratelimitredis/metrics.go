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

// meters are the instruments. Labels are made once per limit, for a cached denial
// is to cost little.
type meters struct {
	decisions metric.Int64Counter
	duration  metric.Float64Histogram
	remaining metric.Float64Histogram
	drift     metric.Int64Counter

	mu     sync.Mutex
	labels atomic.Pointer[map[string]*limitLabels]
}

// limitLabels are the labels of one limit: of a decision by outcome and source,
// and of what remains.
type limitLabels struct {
	decision  [2][3][]metric.AddOption // by outcome and source
	remaining []metric.RecordOption
}

var (
	outcomes = [2]string{"denied", "allowed"}
	sources  = [3]string{"store", "cache", "policy"}
)

func newMeters(provider metric.MeterProvider) (*meters, error) {
	meter := telemetry.New(scope, nil, provider).Meter
	m := &meters{}
	m.labels.Store(&map[string]*limitLabels{})
	var errs [4]error
	m.decisions, errs[0] = meter.Int64Counter("holdfast.ratelimit.decisions",
		metric.WithDescription("Decisions by outcome, by who decided, and by the limit that was nearest to its end."), metric.WithUnit("{decision}"))
	m.duration, errs[1] = meter.Float64Histogram("holdfast.ratelimit.duration",
		metric.WithDescription("Duration of a decision that was not remembered, or of the attempt."), metric.WithUnit("s"))
	m.remaining, errs[2] = meter.Float64Histogram("holdfast.ratelimit.remaining",
		metric.WithDescription("Share that is left of the limit that was nearest to its end."), metric.WithUnit("1"),
		metric.WithExplicitBucketBoundaries(0, 0.05, 0.1, 0.2, 0.5, 0.8))
	m.drift, errs[3] = meter.Int64Counter("holdfast.ratelimit.drift",
		metric.WithDescription("Questions asked again because the server was in another window."), metric.WithUnit("{question}"))
	return m, errors.Join(errs[:]...)
}

func (m *meters) decided(ctx context.Context, d *ratelimit.Decision) {
	limit, share := d.Denied, 0.0
	if limit == "" {
		if s, ok := d.Binding(); ok {
			limit, share = s.Name, float64(s.Remaining)/float64(s.Capacity)
		}
	}
	labels := m.of(limit)
	outcome, source := 0, 0
	if d.Allowed {
		outcome = 1
	}
	switch {
	case d.Cached:
		source = 1
	case d.Fallback:
		source = 2
	}
	m.decisions.Add(ctx, 1, labels.decision[outcome][source]...)
	if limit != "" && !d.Cached {
		m.remaining.Record(ctx, share, labels.remaining...)
	}
}

func (m *meters) unavailable(ctx context.Context) {
	m.decisions.Add(ctx, 1, metric.WithAttributes(attribute.String("outcome", "unavailable"), attribute.String("source", "none"), attribute.String("limit", "")))
}

func (m *meters) took(ctx context.Context, d time.Duration) { m.duration.Record(ctx, d.Seconds()) }

func (m *meters) of(limit string) *limitLabels {
	if known := (*m.labels.Load())[limit]; known != nil {
		return known
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	known := *m.labels.Load()
	if known[limit] != nil {
		return known[limit]
	}
	made := newLimitLabels(limit)
	if len(known) < maxLabels {
		more := maps.Clone(known)
		more[limit] = made
		m.labels.Store(&more)
	}
	return made
}

func newLimitLabels(limit string) *limitLabels {
	name := attribute.String("limit", limit)
	l := &limitLabels{remaining: []metric.RecordOption{metric.WithAttributeSet(attribute.NewSet(name))}}
	for i, outcome := range outcomes {
		for j, source := range sources {
			l.decision[i][j] = []metric.AddOption{metric.WithAttributeSet(attribute.NewSet(
				name, attribute.String("outcome", outcome), attribute.String("source", source)))}
		}
	}
	return l
}
