package inboxamqp

import (
	"context"
	"errors"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/telemetry"
)

// outcome is how a delivery was settled.
type outcome string

const (
	acked    outcome = "acked"
	retried  outcome = "retried"
	dead     outcome = "dead"
	returned outcome = "returned"
	deferred outcome = "deferred" // on its way through a delay longer than the longest retry queue
	stale    outcome = "stale"    // its session was over, so the broker delivers it again
)

// signals are the metrics and spans of a consumer.
type signals struct {
	queue    metric.MeasurementOption
	tracer   trace.Tracer
	settled  metric.Int64Counter
	sessions metric.Int64Counter
}

func newSignals(cfg Config) (*signals, error) {
	kit := telemetry.New(scope, cfg.TracerProvider, cfg.MeterProvider)
	settled, err1 := kit.Meter.Int64Counter("holdfast.inbox.amqp.settled",
		metric.WithDescription("Deliveries by the way they were settled"))
	sessions, err2 := kit.Meter.Int64Counter("holdfast.inbox.amqp.lost_sessions",
		metric.WithDescription("Connections to RabbitMQ that failed or could not be opened"))
	return &signals{
		queue:  metric.WithAttributes(attribute.String("queue", cfg.Queue)),
		tracer: kit.Tracer, settled: settled, sessions: sessions,
	}, errors.Join(err1, err2)
}

func (s *signals) count(ctx context.Context, o outcome) {
	s.settled.Add(ctx, 1, s.queue, metric.WithAttributes(attribute.String("outcome", string(o))))
}

func (s *signals) lost(ctx context.Context) { s.sessions.Add(ctx, 1, s.queue) }

// span begins the processing of a message; the returned function ends it.
func (s *signals) span(ctx context.Context, m *inbox.Message) (context.Context, func(error)) {
	ctx, span := s.tracer.Start(ctx, "process "+m.Queue,
		trace.WithSpanKind(trace.SpanKindConsumer),
		trace.WithLinks(trace.Link{SpanContext: telemetry.Extract(ctx, m.Headers)}),
		trace.WithAttributes(
			attribute.String("messaging.system", "rabbitmq"),
			attribute.String("messaging.destination.name", m.Queue),
			attribute.String("messaging.message.id", m.ID.String()),
			attribute.Int("holdfast.attempt", m.Attempt),
		))
	return ctx, func(err error) {
		if err != nil {
			span.SetStatus(codes.Error, inbox.Classify(err).Class)
		}
		span.End()
	}
}
