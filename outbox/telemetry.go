package outbox

import (
	"context"
	"errors"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/holdfast-go/holdfast/internal/telemetry"
	"github.com/holdfast-go/holdfast/outbox/driver"
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
	lag       metric.Float64Histogram
	confirm   metric.Float64Histogram

	meter  metric.Meter
	gauges gaugeSet
	by     map[string]metric.MeasurementOption // by transport
}

// seconds are the buckets of the histograms, from 1 ms to an hour.
var seconds = metric.WithExplicitBucketBoundaries(
	0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)

func newInstruments(cfg RelayConfig, names []string) (instruments, error) {
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
		metric.WithDescription("Publishing and settling of one batch."), metric.WithUnit("s"), seconds)
	lag, err6 := kit.Meter.Float64Histogram("holdfast.outbox.lag",
		metric.WithDescription("Age of a message at its confirm: from its storing, by the store's clock, to now, by our own."), metric.WithUnit("s"), seconds)
	confirm, err7 := kit.Meter.Float64Histogram("holdfast.outbox.confirm.duration",
		metric.WithDescription("Time from giving a message to its transport to the confirm, the wait for room in the window included."),
		metric.WithUnit("s"), seconds)
	gauges, err8 := newGaugeSet(kit.Meter)
	by := make(map[string]metric.MeasurementOption, len(names))
	for _, name := range names {
		by[name] = metric.WithAttributeSet(attribute.NewSet(attribute.String("transport", name)))
	}
	return instruments{
		tracer: kit.Tracer, published: published, failed: failed, givenBack: givenBack, stale: stale,
		duration: duration, lag: lag, confirm: confirm, meter: kit.Meter, gauges: gauges, by: by,
	}, errors.Join(err1, err2, err3, err4, err5, err6, err7, err8)
}

// confirmed measures a message that was given to its transport at begin.
func (t instruments) confirmed(ctx context.Context, m driver.Message, begin time.Time) {
	now, transport := time.Now(), t.by[m.Transport]
	t.confirm.Record(ctx, now.Sub(begin).Seconds(), transport)
	if !m.CreatedAt.IsZero() {
		t.lag.Record(ctx, max(0, now.Sub(m.CreatedAt).Seconds()), transport)
	}
}

// startRound begins the span of one batch, linked to the spans that wrote its messages.
func (t instruments) startRound(ctx context.Context, b driver.Batch) (context.Context, func()) {
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

func (t instruments) countFailure(ctx context.Context, f failure) {
	t.failed.Add(ctx, 1, metric.WithAttributes(attribute.String("class", string(f.class)), attribute.Bool("dead", f.dead)))
}
