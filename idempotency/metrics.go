package idempotency

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/internal/telemetry"
)

const scopeName = "github.com/holdfast-go/holdfast/idempotency"

// result is how a request ended: the attribute result of the metrics.
type result string

const (
	resultCompleted     result = "completed"          // the handler ran, its response is kept
	resultReleased      result = "released"           // the handler ran, the key is free again
	resultTombstoned    result = "tombstoned"         // the handler ran, its response cannot be kept
	resultBypassed      result = "bypassed"           // the handler ran without protection
	resultLeaseLost     result = "lease_lost"         // the handler ran, and the key was lost meanwhile
	resultPersistFailed result = "persist_failed"     // the handler ran, the store did not take the result
	resultReplayed      result = "replayed"           // answered from the record
	resultInUse         result = "in_use"             // refused: the key is being worked on
	resultReused        result = "reused"             // refused: the key of another request
	resultUnavailable   result = "result_unavailable" // refused: the record is a tombstone
	resultStoreDown     result = "store_unavailable"  // refused: the store could not be asked, before the handler or by it
	resultInvalid       result = "invalid"            // refused: no key, no scope or no body to work with
)

var results = []result{
	resultCompleted, resultReleased, resultTombstoned, resultBypassed, resultLeaseLost, resultPersistFailed,
	resultReplayed, resultInUse, resultReused, resultUnavailable, resultStoreDown, resultInvalid,
}

// meter measures requests by result.
type meter struct {
	requests metric.Int64Counter
	active   metric.Int64UpDownCounter
	fellBack metric.Int64Counter
	duration metric.Float64Histogram
	adds     map[result][]metric.AddOption
	records  map[result][]metric.RecordOption
}

func newMeter(mp metric.MeterProvider) (*meter, error) {
	api := telemetry.New(scopeName, nil, mp).Meter
	var errs [4]error
	m := &meter{adds: map[result][]metric.AddOption{}, records: map[result][]metric.RecordOption{}}
	m.requests, errs[0] = api.Int64Counter("holdfast.idempotency.requests",
		metric.WithDescription("Requests that need an idempotency key, by result."), metric.WithUnit("{request}"))
	m.active, errs[1] = api.Int64UpDownCounter("holdfast.idempotency.active",
		metric.WithDescription("Handlers that are running under an acquired key."), metric.WithUnit("{request}"))
	m.duration, errs[2] = api.Float64Histogram("holdfast.idempotency.duration",
		metric.WithDescription("Duration of requests that need an idempotency key, by result."), metric.WithUnit("s"), telemetry.Seconds)
	m.fellBack, errs[3] = api.Int64Counter("holdfast.idempotency.fallbacks",
		metric.WithDescription("Requests whose store could not be asked, so that what stands behind it decided."), metric.WithUnit("{request}"))
	if err := errors.Join(errs[:]...); err != nil {
		return nil, fmt.Errorf("idempotency: metrics: %w", err)
	}
	for _, r := range results {
		with := metric.WithAttributeSet(attribute.NewSet(attribute.String("result", string(r))))
		m.adds[r], m.records[r] = []metric.AddOption{with}, []metric.RecordOption{with}
	}
	return m, nil
}

func (m *meter) done(ctx context.Context, r result, took time.Duration) {
	m.requests.Add(ctx, 1, m.adds[r]...)
	m.duration.Record(ctx, took.Seconds(), m.records[r]...)
}

// resultOfRun is that of a request that ran the handler. refused says that the
// handler could not ask the store; err is what the store said to the end of it.
func resultOfRun(s *settlement, resp *driver.Response, refused bool, err error) result {
	switch {
	case s != nil && s.replayed:
		return resultReplayed
	case refused && s == nil && resp == nil: // nothing was done, whatever became of the claim
		return resultStoreDown
	case errors.Is(err, ErrLeaseLost):
		return resultLeaseLost
	case err != nil:
		return resultPersistFailed
	}
	if s != nil {
		resp = &s.record.Response
	}
	switch {
	case resp == nil:
		return resultReleased
	case resp.Unavailable():
		return resultTombstoned
	}
	return resultCompleted
}

// resultOf is that of a request that was refused.
func resultOf(err error) result {
	switch {
	case errors.Is(err, ErrKeyInUse):
		return resultInUse
	case errors.Is(err, ErrKeyReused):
		return resultReused
	case errors.Is(err, ErrResultUnavailable):
		return resultUnavailable
	case errors.Is(err, ErrStoreUnavailable):
		return resultStoreDown
	}
	return resultInvalid
}
