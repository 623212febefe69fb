package outbox

import (
	"context"
	"errors"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
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
	kit       telemetry.Kit
	published metric.Int64Counter
	failed    metric.Int64Counter
	givenBack metric.Int64Counter
	stale     metric.Int64Counter
	duration  metric.Float64Histogram
	lag       metric.Float64Histogram
	confirm   metric.Float64Histogram

	gauges gaugeSet
	by     map[string]metric.MeasurementOption // by transport
	spans  map[string]trace.SpanStartOption    // what is said of each message that is sent, by transport
}

func newInstruments(cfg RelayConfig, publishers map[string]driver.Publisher) (instruments, error) {
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
		metric.WithDescription("Publishing and settling of one batch."), metric.WithUnit("s"), telemetry.Seconds)
	lag, err6 := kit.Meter.Float64Histogram("holdfast.outbox.lag",
		metric.WithDescription("Age of a message at its confirm: from its storing, by the store's clock, to now, by our own."), metric.WithUnit("s"), telemetry.Seconds)
	confirm, err7 := kit.Meter.Float64Histogram("holdfast.outbox.confirm.duration",
		metric.WithDescription("Time from giving a message to its transport to the confirm, the wait for room in the window included."),
		metric.WithUnit("s"), telemetry.Seconds)
	gauges, err8 := newGaugeSet(kit.Meter)
	by, spans := map[string]metric.MeasurementOption{}, map[string]trace.SpanStartOption{}
	for name, publisher := range publishers {
		by[name] = metric.WithAttributeSet(attribute.NewSet(attribute.String("transport", name)))
		spans[name] = trace.WithAttributes(ofTransport(name, publisher)...)
	}
	return instruments{
		kit: kit, published: published, failed: failed, givenBack: givenBack, stale: stale,
		duration: duration, lag: lag, confirm: confirm, gauges: gauges, by: by, spans: spans,
	}, errors.Join(err1, err2, err3, err4, err5, err6, err7, err8)
}

// ofTransport is what the span of each message says that is sent through a transport.
func ofTransport(name string, publisher driver.Publisher) []attribute.KeyValue {
	attrs := append(telemetry.Operation("send"), attribute.String("holdfast.transport", name))
	if known, ok := publisher.(driver.Identified); ok {
		attrs = append(attrs, attribute.String("messaging.system", known.System()))
	}
	return attrs
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
	took := func() { t.duration.Record(ctx, time.Since(begin).Seconds()) }
	if t.kit.Silent() {
		return ctx, took
	}
	var links []trace.Link
	for _, m := range b.Messages[:min(len(b.Messages), maxLinks)] {
		if sc := telemetry.Extract(ctx, m.Headers); sc.IsValid() {
			links = append(links, trace.Link{SpanContext: sc})
		}
	}
	ctx, span := t.kit.Tracer.Start(ctx, "outbox.publish",
		trace.WithLinks(links...), trace.WithAttributes(attribute.Int("messaging.batch.message_count", len(b.Messages))))
	return ctx, func() {
		span.End()
		took()
	}
}

// startSend begins the span of sending one message. Its parent is the span that created the message, and it links to
// the span of the batch in ctx. It returns nil where no span is recorded. Its kind is client: the conventions keep the
// kind producer for the span that consumers link to, which is the creation.
func (t instruments) startSend(ctx context.Context, m driver.Message) trace.Span {
	if t.kit.Silent() {
		return nil
	}
	writer := telemetry.Extract(ctx, m.Headers)
	if !writer.IsValid() {
		return nil
	}
	opts := []trace.SpanStartOption{
		trace.WithSpanKind(trace.SpanKindClient), trace.WithAttributes(messageID(m)),
		trace.WithLinks(trace.Link{SpanContext: writer}, trace.LinkFromContext(ctx)),
	}
	if known := t.spans[m.Transport]; known != nil {
		opts = append(opts, known)
	}
	_, span := t.kit.Tracer.Start(trace.ContextWithRemoteSpanContext(ctx, writer), "send "+m.Name, opts...)
	return span
}

// endSend ends the span of a message that was confirmed or failed.
func endSend(span trace.Span, err error) {
	if span == nil {
		return
	}
	if err != nil {
		class := string(driver.ClassOf(err))
		span.SetAttributes(attribute.String("error.type", class))
		span.SetStatus(codes.Error, class)
	}
	span.End()
}

// create leaves a span of the creation of a message in a trace that is recorded. What is done for the message later, in
// other processes, is below it.
func create(ctx context.Context, m *driver.Message) context.Context {
	writer := trace.SpanFromContext(ctx)
	if !writer.IsRecording() {
		return ctx
	}
	ctx, span := writer.TracerProvider().Tracer(scope).Start(ctx, "create "+m.Name,
		trace.WithSpanKind(trace.SpanKindProducer), trace.WithAttributes(messageID(*m)), trace.WithAttributes(telemetry.Operation("create")...))
	span.End()
	return ctx
}

func messageID(m driver.Message) attribute.KeyValue {
	return attribute.String("messaging.message.id", m.ID.String())
}

func (t instruments) countFailure(ctx context.Context, f failure) {
	t.failed.Add(ctx, 1, metric.WithAttributes(attribute.String("class", string(f.class)), attribute.Bool("dead", f.dead)))
}
