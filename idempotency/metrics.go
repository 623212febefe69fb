package idempotency

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/holdfast-go/holdfast/internal/telemetry"
)

const scopeName = "github.com/holdfast-go/holdfast/idempotency"

// meter measures requests by result.
type meter struct {
	requests metric.Int64Counter
	active   metric.Int64UpDownCounter
	duration metric.Float64Histogram
	adds     map[Result][]metric.AddOption
	records  map[Result][]metric.RecordOption
}

func newMeter(mp metric.MeterProvider) (*meter, error) {
	api := telemetry.New(scopeName, nil, mp).Meter
	var errs [3]error
	m := &meter{adds: map[Result][]metric.AddOption{}, records: map[Result][]metric.RecordOption{}}
	m.requests, errs[0] = api.Int64Counter("holdfast.idempotency.requests",
		metric.WithDescription("Requests that need an idempotency key, by result."), metric.WithUnit("{request}"))
	m.active, errs[1] = api.Int64UpDownCounter("holdfast.idempotency.active",
		metric.WithDescription("Handlers that are running under an acquired key."), metric.WithUnit("{request}"))
	m.duration, errs[2] = api.Float64Histogram("holdfast.idempotency.duration",
		metric.WithDescription("Duration of requests that need an idempotency key, by result."), metric.WithUnit("s"))
	if err := errors.Join(errs[:]...); err != nil {
		return nil, fmt.Errorf("idempotency: metrics: %w", err)
	}
	for _, r := range results {
		with := metric.WithAttributeSet(attribute.NewSet(attribute.String("result", string(r))))
		m.adds[r], m.records[r] = []metric.AddOption{with}, []metric.RecordOption{with}
	}
	return m, nil
}

func (m *meter) done(ctx context.Context, r Result, took time.Duration) {
	m.requests.Add(ctx, 1, m.adds[r]...)
	m.duration.Record(ctx, took.Seconds(), m.records[r]...)
}

// resultOfRun is that of a request that ran the handler; err is what the store
// said to the end of it.
func resultOfRun(s *settlement, resp *Response, err error) Result {
	switch {
	case s != nil && s.replayed:
		return ResultReplayed
	case errors.Is(err, ErrLeaseLost):
		return ResultLeaseLost
	case err != nil:
		return ResultPersistFailed
	}
	if s != nil {
		resp = &s.record.Response
	}
	switch {
	case resp == nil:
		return ResultReleased
	case resp.Unavailable():
		return ResultTombstoned
	}
	return ResultCompleted
}

// resultOf is that of a request that was refused.
func resultOf(err error) Result {
	if _, ok := errors.AsType[*InUseError](err); ok {
		return ResultInUse
	}
	switch {
	case errors.Is(err, ErrKeyReused):
		return ResultReused
	case errors.Is(err, ErrResultUnavailable):
		return ResultUnavailable
	case errors.Is(err, ErrStoreUnavailable):
		return ResultStoreDown
	}
	return ResultInvalid
}
