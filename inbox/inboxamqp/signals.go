package inboxamqp

import (
	"context"
	"errors"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/telemetry"
)

// outcome is how a delivery was settled.
type outcome string

const (
	acked      outcome = "acked"
	retried    outcome = "retried"
	dead       outcome = "dead"
	returned   outcome = "returned"
	displaced  outcome = "displaced"  // behind the others: no queue took its copy, or it is suspected
	deferred   outcome = "deferred"   // on its way through a delay longer than the longest retry queue
	superseded outcome = "superseded" // a leftover: its retry was on its way already
	stale      outcome = "stale"      // its session was over, so the broker delivers it again
)

// signals are the metrics and spans of a consumer.
type signals struct {
	queue    metric.MeasurementOption
	outcomes map[outcome]metric.MeasurementOption // made once: they are counted with every message
	kit      telemetry.Kit
	settled  metric.Int64Counter
	sessions metric.Int64Counter
	hanging  metric.Int64Counter
}

func newSignals(cfg *settings) (*signals, error) {
	kit := telemetry.New(scope, cfg.TracerProvider, cfg.MeterProvider)
	settled, err1 := kit.Meter.Int64Counter("holdfast.inbox.amqp.settled",
		metric.WithDescription("Deliveries by the way they were settled"))
	sessions, err2 := kit.Meter.Int64Counter("holdfast.inbox.amqp.lost_sessions",
		metric.WithDescription("Connections to RabbitMQ that failed or could not be opened"))
	hanging, err3 := kit.Meter.Int64Counter("holdfast.inbox.amqp.stuck",
		metric.WithDescription("Handlers that did not return in time"))
	outcomes := map[outcome]metric.MeasurementOption{}
	for _, o := range []outcome{acked, retried, dead, returned, displaced, deferred, superseded, stale} {
		outcomes[o] = metric.WithAttributeSet(attribute.NewSet(attribute.String("queue", cfg.queue), attribute.String("outcome", string(o))))
	}
	return &signals{
		outcomes: outcomes,
		queue:    metric.WithAttributes(attribute.String("queue", cfg.queue)),
		kit:      kit, settled: settled, sessions: sessions, hanging: hanging,
	}, errors.Join(err1, err2, err3)
}

func (s *signals) count(ctx context.Context, o outcome) {
	s.settled.Add(ctx, 1, s.outcomes[o])
}

func (s *signals) stuck(ctx context.Context) { s.hanging.Add(ctx, 1, s.queue) }

func (s *signals) lost(ctx context.Context) { s.sessions.Add(ctx, 1, s.queue) }

// span begins the processing of messages; the returned function ends it.
func (s *signals) span(ctx context.Context, msgs []*inbox.Message) (context.Context, func([]error)) {
	if s.kit.Silent() {
		return ctx, func([]error) {}
	}
	links := make([]trace.Link, 0, len(msgs))
	for _, m := range msgs {
		if sender := telemetry.Extract(ctx, m.Headers); sender.IsValid() {
			links = append(links, trace.Link{SpanContext: sender})
		}
	}
	attrs := []attribute.KeyValue{
		attribute.String("messaging.system", "rabbitmq"),
		attribute.String("messaging.destination.name", msgs[0].Queue),
	}
	if len(msgs) == 1 {
		attrs = append(attrs, attribute.String("messaging.message.id", msgs[0].ID.String()), attribute.Int("holdfast.attempt", msgs[0].Attempt))
	} else {
		attrs = append(attrs, attribute.Int("messaging.batch.message_count", len(msgs)))
	}
	ctx, span := s.kit.Tracer.Start(ctx, "process "+msgs[0].Queue,
		trace.WithSpanKind(trace.SpanKindConsumer), trace.WithLinks(links...), trace.WithAttributes(attrs...))
	return ctx, func(results []error) {
		for _, err := range results {
			if err != nil {
				span.SetStatus(codes.Error, driver.Classify(err).Class)
				break
			}
		}
		span.End()
	}
}
