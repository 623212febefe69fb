package idempotency

import (
	"context"
	"errors"
	"fmt"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/holdfast-go/holdfast/internal/telemetry"
)

const scopeName = "github.com/holdfast-go/holdfast/idempotency"

// The values of the attribute outcome.
const (
	outcomeCompleted   = "completed"
	outcomeReleased    = "released"
	outcomeTombstoned  = "tombstoned"
	outcomeNotStored   = "not_stored"
	outcomeLeaseLost   = "lease_lost"
	outcomeReplayed    = "replayed"
	outcomeInUse       = "in_use"
	outcomeReused      = "reused"
	outcomeUnavailable = "result_unavailable"
	outcomeStoreDown   = "store_unavailable"
	outcomeInvalid     = "invalid"
)

// counter counts requests by outcome.
type counter struct {
	requests metric.Int64Counter
	by       map[string]metric.MeasurementOption
}

func newCounter(mp metric.MeterProvider) (*counter, error) {
	requests, err := telemetry.New(scopeName, nil, mp).Meter.Int64Counter("holdfast.idempotency.requests",
		metric.WithDescription("Requests that need an idempotency key, by outcome."), metric.WithUnit("{request}"))
	if err != nil {
		return nil, fmt.Errorf("idempotency: counter: %w", err)
	}
	c := &counter{requests: requests, by: map[string]metric.MeasurementOption{}}
	for _, o := range []string{
		outcomeCompleted, outcomeReleased, outcomeTombstoned, outcomeNotStored, outcomeLeaseLost,
		outcomeReplayed, outcomeInUse, outcomeReused, outcomeUnavailable, outcomeStoreDown, outcomeInvalid,
	} {
		c.by[o] = metric.WithAttributeSet(attribute.NewSet(attribute.String("outcome", o)))
	}
	return c, nil
}

func (c *counter) add(ctx context.Context, outcome string) {
	c.requests.Add(ctx, 1, c.by[outcome])
}

// outcomeOfRun is that of a request that ran the handler; err is what the store
// said to the end of it.
func outcomeOfRun(settled bool, resp *Response, err error) string {
	switch {
	case errors.Is(err, ErrLeaseLost):
		return outcomeLeaseLost
	case err != nil:
		return outcomeNotStored
	case settled:
		return outcomeCompleted
	case resp == nil:
		return outcomeReleased
	case resp.Unavailable():
		return outcomeTombstoned
	}
	return outcomeCompleted
}

// outcomeOf is that of a request that was refused.
func outcomeOf(err error) string {
	if _, ok := errors.AsType[*InUseError](err); ok {
		return outcomeInUse
	}
	switch {
	case errors.Is(err, ErrKeyReused):
		return outcomeReused
	case errors.Is(err, ErrResultUnavailable):
		return outcomeUnavailable
	case errors.Is(err, errStoreUnavailable):
		return outcomeStoreDown
	}
	return outcomeInvalid
}
