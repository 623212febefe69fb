package outbox

import (
	"context"
	"errors"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/holdfast-go/holdfast/internal/telemetry"
)

const scope = "github.com/holdfast-go/holdfast/outbox"

// maxLinks bounds the links from a batch's span to the spans that wrote its messages.
const maxLinks = 64

// instruments are the relay's metrics and its tracer.
type instruments struct {
	tracer    trace.Tracer
	published metric.Int64Counter
	failed    metric.Int64Counter
	givenBack metric.Int64Counter
	stale     metric.Int64Counter
	duration  metric.Float64Histogram
}

func newInstruments(cfg RelayConfig) (instruments, error) {
	kit := telemetry.New(scope, cfg.TracerProvider, cfg.MeterProvider)
	published, err1 := kit.Meter.Int64Counter("holdfast.outbox.published",
		metric.WithDescription("Messages confirmed by their transport."), metric.WithUnit("{message}"))
	failed, err2 := kit.Meter.Int64Counter("holdfast.outbox.failed",
		metric.WithDescription("Failed attempts to publish, by class, and whether the message is a dead letter now."), metric.WithUnit("{attempt}"))
	givenBack, err3 := kit.Meter.Int64Counter("holdfast.outbox.given_back",
		metric.WithDescription("Claimed messages given back untouched."), metric.WithUnit("{message}"))
	stale, err4 := kit.Meter.Int64Counter("holdfast.outbox.stale_leases",
		metric.WithDescription("Leases that ran out before they were settled; should stay 0."), metric.WithUnit("{lease}"))
	duration, err5 := kit.Meter.Float64Histogram("holdfast.outbox.batch.duration",
		metric.WithDescription("Publishing and settling of one batch."), metric.WithUnit("s"))
	return instruments{kit.Tracer, published, failed, givenBack, stale, duration}, errors.Join(err1, err2, err3, err4, err5)
}

// startRound begins the span of one batch, linked to the spans that wrote its messages.
func (t instruments) startRound(ctx context.Context, b Batch) (context.Context, func()) {
	begin := time.Now()
	var links []trace.Link
	for _, m := range b.Messages[:min(len(b.Messages), maxLinks)] {
		if sc := telemetry.Extract(ctx, m.Headers); sc.IsValid() {
			links = append(links, trace.Link{SpanContext: sc})
		}
	}
	ctx, span := t.tracer.Start(ctx, "outbox.publish", trace.WithSpanKind(trace.SpanKindProducer),
		trace.WithLinks(links...), trace.WithAttributes(attribute.Int("messaging.batch.message_count", len(b.Messages))))
	return ctx, func() {
		span.End()
		t.duration.Record(ctx, time.Since(begin).Seconds())
	}
}

func (t instruments) countFailure(ctx context.Context, f Failure) {
	t.failed.Add(ctx, 1, metric.WithAttributes(attribute.String("class", string(f.Class)), attribute.Bool("dead", f.Dead)))
}
