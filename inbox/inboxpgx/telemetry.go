package inboxpgx

import (
	"context"
	"fmt"
	"sync"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/holdfast-go/holdfast/internal/telemetry"
)

const scope = "github.com/holdfast-go/holdfast/inbox/inboxpgx"

// outcome is how a delivery ended, for the counter.
type outcome string

const (
	done      outcome = "done"
	duplicate outcome = "duplicate"
	parked    outcome = "parked" // its ordering key is stopped
	failed    outcome = "failed"
)

// counter counts deliveries by consumer, message name and outcome.
type counter struct {
	messages metric.Int64Counter
	consumer attribute.KeyValue
	options  *sync.Map // of metric.MeasurementOption by counted: made once for each
}

type counted struct {
	name string
	outcome
}

func newCounter(consumer string, provider metric.MeterProvider) (counter, error) {
	messages, err := telemetry.New(scope, nil, provider).Meter.Int64Counter("holdfast.inbox.messages",
		metric.WithDescription("Deliveries that reached a handler's transaction, by outcome."), metric.WithUnit("{message}"))
	if err != nil {
		return counter{}, fmt.Errorf("inboxpgx: counter: %w", err)
	}
	return counter{messages: messages, consumer: attribute.String("consumer", consumer), options: &sync.Map{}}, nil
}

// add counts one delivery. With an error it has failed. The name is one of those with a handler, so they are few.
func (c counter) add(ctx context.Context, name string, o outcome, err error) {
	if !c.messages.Enabled(ctx) {
		return
	}
	if err != nil {
		o = failed
	}
	c.messages.Add(ctx, 1, c.option(counted{name, o}))
}

func (c counter) option(of counted) metric.MeasurementOption {
	if known, ok := c.options.Load(of); ok {
		return known.(metric.MeasurementOption)
	}
	made := metric.WithAttributeSet(attribute.NewSet(c.consumer, attribute.String("name", of.name), attribute.String("outcome", string(of.outcome))))
	c.options.Store(of, made)
	return made
}
