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

// result is the outcome of a request, the attribute result of the metrics.
type result string

const (
	resultCompleted     result = "completed"          // the handler ran, its response is kept
	resultReleased      result = "released"           // the handler ran, the key is free again
	resultTombstoned    result = "tombstoned"         // the handler ran, but its response cannot be kept
	resultBypassed      result = "bypassed"           // the handler ran without protection
	resultLeaseLost     result = "lease_lost"         // the handler ran, but the lease was lost
	resultPersistFailed result = "persist_failed"     // the handler ran, but storing the result failed
	resultReplayed      result = "replayed"           // answered from the record
	resultInUse         result = "in_use"             // rejected: another request with the key is running
	resultReused        result = "reused"             // rejected: the key belongs to another request
	resultUnavailable   result = "result_unavailable" // rejected: the record is a tombstone
	resultStoreDown     result = "store_unavailable"  // rejected: the store was unreachable, for the middleware or for the handler
	resultInvalid       result = "invalid"            // rejected: the key, the scope or the body is missing or invalid
)

var results = []result{
	resultCompleted, resultReleased, resultTombstoned, resultBypassed, resultLeaseLost, resultPersistFailed,
	resultReplayed, resultInUse, resultReused, resultUnavailable, resultStoreDown, resultInvalid,
}

// meter counts and times requests by result.
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
		metric.WithDescription("Handlers running under an acquired key."), metric.WithUnit("{request}"))
	m.duration, errs[2] = api.Float64Histogram("holdfast.idempotency.duration",
		metric.WithDescription("Duration of requests that need an idempotency key, by result."), metric.WithUnit("s"), telemetry.Seconds)
	m.fellBack, errs[3] = api.Int64Counter("holdfast.idempotency.fallbacks",
		metric.WithDescription("Requests that used the fallback because the store was unavailable."), metric.WithUnit("{request}"))
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

// resultOfRun returns the result of a request that ran the handler. refused means that the handler could not reach
// the store; err is the store's error at the end of the run.
func resultOfRun(s *settlement, resp *driver.Response, refused bool, err error) result {
	switch {
	case s != nil && s.replayed:
		return resultReplayed
	case refused && s == nil && resp == nil: // nothing was done, even if closing the claim failed
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

// resultOf returns the result of a rejected request.
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
