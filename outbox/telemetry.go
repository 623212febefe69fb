package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/holdfast-go/holdfast/internal/telemetry"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// Stats is the state of a relay and of its store. No count exceeds 100,000; that number means 100,000 or
// more. The counts and the age are 0 if the store does not report them.
type Stats struct {
	// Ready counts the messages that are not published and do not wait for a time. It includes messages
	// behind a parked message of their key, and messages of a paused transport.
	Ready int
	// Parked counts the messages that wait for their first or their next attempt.
	Parked int
	// Dead counts the dead letters.
	Dead int
	// OldestAge is the age of the oldest message that is ready or waits after a failure. 0 means that there
	// is none.
	OldestAge time.Duration
	// Transports has the state of each transport by name.
	Transports map[string]TransportStats
}

// TransportStats is the state of one transport from this relay's view.
type TransportStats struct {
	// State is "closed" (messages flow), "paused" (the transport was unavailable or blocked, and the relay
	// sends nothing) or "probing" (the pause is over, and one batch tests the transport).
	State string
	// Failures counts the batches in a row for which the transport was unavailable or blocked. Err is the
	// last failure; nil means that the transport works.
	Failures int
	Err      error
	// Window is the used part of the publisher's window, from 0 to 1. It is 0 if the publisher is not Windowed.
	Window float64
}

const (
	stateClosed  = "closed"
	statePaused  = "paused"
	stateProbing = "probing"
)

// Counts returns the numbers of messages that this process has published and failed to publish. It makes no server call.
func (r *Relay) Counts() driver.Counts {
	c := r.telemetry.counts
	return driver.Counts{Done: c.done.Load(), Failed: c.failed.Load(), Retried: c.retried.Load()}
}

// Stats reads the state of the store and the publishers, within 5 s. It returns an error if the store could not be
// read; Transports is valid with an error too.
func (r *Relay) Stats(ctx context.Context) (Stats, error) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.storeTimeout())
	defer cancel()
	stats := Stats{Transports: r.transports.stats()}
	source, ok := r.source.(driver.Measured)
	if !ok {
		return stats, nil
	}
	store, err := source.Depth(ctx)
	if err != nil {
		return stats, fmt.Errorf("outbox: stats: %w", err)
	}
	stats.Ready, stats.Parked, stats.Dead, stats.OldestAge = store.Ready, store.Parked, store.Dead, store.OldestAge
	return stats, nil
}

const (
	// gaugeInterval is how long the last backlog read from the store is reported again.
	gaugeInterval = 5 * time.Second
	// gaugeTimeout limits reading the backlog, and so the collection of all metrics.
	gaugeTimeout = 2 * time.Second
)

// gaugeSet is the set of observable instruments.
type gaugeSet struct {
	depth  metric.Int64ObservableGauge
	oldest metric.Float64ObservableGauge
	state  metric.Int64ObservableGauge
	window metric.Float64ObservableGauge
}

func newGaugeSet(meter metric.Meter) (gaugeSet, error) {
	depth, err1 := meter.Int64ObservableGauge("holdfast.outbox.depth",
		metric.WithDescription("Messages in the store by state: ready, parked or dead. Counted up to 100,000."), metric.WithUnit("{message}"))
	oldest, err2 := meter.Float64ObservableGauge("holdfast.outbox.oldest.age",
		metric.WithDescription("Age of the oldest message that is ready or waits after a failure."), metric.WithUnit("s"))
	state, err3 := meter.Int64ObservableGauge("holdfast.outbox.transport.state",
		metric.WithDescription("1 for the state that the transport is in: closed, paused or probing; 0 for the others."))
	window, err4 := meter.Float64ObservableGauge("holdfast.outbox.window.fill",
		metric.WithDescription("Unconfirmed messages as a part of the window."), metric.WithUnit("1"))
	return gaugeSet{depth, oldest, state, window}, errors.Join(err1, err2, err3, err4)
}

// gauges collects the gauges of one Run of a relay.
type gauges struct {
	relay *Relay

	mu    sync.Mutex
	store *driver.Depth
	asked time.Time
}

// observe registers the relay's gauges until stop is called.
func (r *Relay) observe(ctx context.Context) (stop func()) {
	run, cancel := context.WithCancel(context.WithoutCancel(ctx)) // lasts until all confirms have arrived
	g, set := &gauges{relay: r}, r.telemetry.gauges
	registered, err := r.telemetry.kit.Meter.RegisterCallback(func(ctx context.Context, o metric.Observer) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(run, cancel)()
		return g.collect(ctx, o)
	}, set.depth, set.oldest, set.state, set.window)
	if err != nil {
		cancel()
		r.cfg.Logger.WarnContext(ctx, "outbox: could not register gauges", slog.Any("error", err))
		return func() {}
	}
	return func() {
		cancel() // ends a running collection, which would block Unregister
		if err := registered.Unregister(); err != nil {
			r.cfg.Logger.WarnContext(ctx, "outbox: could not unregister gauges", slog.Any("error", err))
		}
	}
}

func (g *gauges) collect(ctx context.Context, o metric.Observer) error {
	set, attributes := g.relay.telemetry.gauges, g.relay.telemetry.attributes
	for name, t := range g.relay.transports.stats() {
		transport := attribute.String("transport", name)
		for _, state := range []string{stateClosed, statePaused, stateProbing} {
			var is int64
			if t.State == state {
				is = 1
			}
			o.ObserveInt64(set.state, is, attributes(transport, attribute.String("state", state)))
		}
		if _, ok := g.relay.transports[name].publisher.(driver.Windowed); ok {
			o.ObserveFloat64(set.window, t.Window, attributes(transport))
		}
	}
	store, err := g.stored(ctx)
	if store == nil {
		return err
	}
	for state, n := range map[string]int{"ready": store.Ready, "parked": store.Parked, "dead": store.Dead} {
		o.ObserveInt64(set.depth, int64(n), attributes(attribute.String("state", state)))
	}
	o.ObserveFloat64(set.oldest, store.OldestAge.Seconds(), attributes())
	return nil
}

// stored returns the backlog last read from the store, or nil if the store does not report one.
func (g *gauges) stored(ctx context.Context) (*driver.Depth, error) {
	source, ok := g.relay.source.(driver.Measured)
	if !ok {
		return nil, nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.asked.IsZero() && time.Since(g.asked) < gaugeInterval {
		return g.store, nil
	}
	ctx, cancel := context.WithTimeout(ctx, gaugeTimeout)
	defer cancel()
	g.store = nil
	stats, err := source.Depth(ctx)
	g.asked = time.Now()
	if err != nil {
		return nil, err
	}
	g.store = &stats
	return g.store, nil
}

const scope = "github.com/holdfast-go/holdfast/outbox"

// maxLinks bounds the links from a batch's span to the spans that wrote its messages.
const maxLinks = 64

// counts are the numbers of a relay's attempts since its start.
type counts struct{ done, failed, retried atomic.Int64 }

// instruments holds the relay's metrics and its tracer.
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
	counts *counts
	name   string // of the outbox

	// The attributes are slices, because an argument list of options is allocated for each call.
	adds    []metric.AddOption
	records []metric.RecordOption
	by      map[string][]metric.RecordOption // by transport
	spans   map[string]trace.SpanStartOption // attributes of each send span, by transport
}

func newInstruments(source driver.Source, publishers map[string]driver.Publisher, cfg RelayConfig) (instruments, error) {
	kit := telemetry.New(scope, cfg.TracerProvider, cfg.MeterProvider)
	published, err1 := kit.Meter.Int64Counter("holdfast.outbox.published",
		metric.WithDescription("Messages confirmed by their transport."), metric.WithUnit("{message}"))
	failed, err2 := kit.Meter.Int64Counter("holdfast.outbox.failed",
		metric.WithDescription("Failed attempts to publish, by class and by whether the message became a dead letter."), metric.WithUnit("{attempt}"))
	givenBack, err3 := kit.Meter.Int64Counter("holdfast.outbox.given_back",
		metric.WithDescription("Claimed messages released unchanged."), metric.WithUnit("{message}"))
	stale, err4 := kit.Meter.Int64Counter("holdfast.outbox.stale_leases",
		metric.WithDescription("Leases that expired before they were settled; should stay 0."), metric.WithUnit("{lease}"))
	duration, err5 := kit.Meter.Float64Histogram("holdfast.outbox.batch.duration",
		metric.WithDescription("Time to publish and settle one batch."), metric.WithUnit("s"), telemetry.Seconds)
	lag, err6 := kit.Meter.Float64Histogram("holdfast.outbox.lag",
		metric.WithDescription("Age of a message at its confirm: stored time by the store's clock, confirm time by the relay's clock."), metric.WithUnit("s"), telemetry.Seconds)
	confirm, err7 := kit.Meter.Float64Histogram("holdfast.outbox.confirm.duration",
		metric.WithDescription("Time from passing a message to its transport to its confirm, including the wait for the window."),
		metric.WithUnit("s"), telemetry.Seconds)
	gauges, err8 := newGaugeSet(kit.Meter)
	t := instruments{
		kit: kit, published: published, failed: failed, givenBack: givenBack, stale: stale,
		duration: duration, lag: lag, confirm: confirm, gauges: gauges, counts: &counts{},
		by: map[string][]metric.RecordOption{}, spans: map[string]trace.SpanStartOption{},
	}
	if named, ok := source.(driver.Named); ok {
		t.name = named.Name()
	}
	t.adds, t.records = []metric.AddOption{t.attributes()}, []metric.RecordOption{t.attributes()}
	for name, publisher := range publishers {
		t.by[name] = []metric.RecordOption{t.attributes(attribute.String("transport", name))}
		t.spans[name] = trace.WithAttributes(ofTransport(name, publisher)...)
	}
	return t, errors.Join(err1, err2, err3, err4, err5, err6, err7, err8)
}

// attributes returns attributes of a measurement with the name of the outbox. A process may relay several outboxes.
func (t instruments) attributes(more ...attribute.KeyValue) metric.MeasurementOption {
	return metric.WithAttributeSet(attribute.NewSet(append(more, attribute.String("outbox", t.name))...))
}

// ofTransport returns the attributes of the send spans of a transport.
func ofTransport(name string, publisher driver.Publisher) []attribute.KeyValue {
	attrs := append(telemetry.Operation("send"), attribute.String("holdfast.transport", name))
	if known, ok := publisher.(driver.Identified); ok {
		attrs = append(attrs, attribute.String("messaging.system", known.System()))
	}
	return attrs
}

// confirmed measures a message that was passed to its transport at begin.
func (t instruments) confirmed(ctx context.Context, m driver.Message, begin time.Time) {
	now, transport := time.Now(), t.by[m.Transport]
	t.confirm.Record(ctx, now.Sub(begin).Seconds(), transport...)
	if !m.CreatedAt.IsZero() {
		t.lag.Record(ctx, max(0, now.Sub(m.CreatedAt).Seconds()), transport...)
	}
}

// startRound starts the span of one batch, linked to the spans that wrote its messages.
func (t instruments) startRound(ctx context.Context, b driver.Batch) (context.Context, func()) {
	begin := time.Now()
	took := func() { t.duration.Record(ctx, time.Since(begin).Seconds(), t.records...) }
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

// startSend starts the span of sending one message. Its parent is the span that created the message, and it links to
// the span of the batch in ctx. It returns nil if no span is recorded. Its kind is client, because the conventions
// reserve the kind producer for the create span, which consumers link to.
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

// create records a span for the creation of a message, if the trace of ctx is recorded. Spans of later work on the
// message, also in other processes, are children of this span.
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

func (t instruments) countPublished(ctx context.Context, n int) {
	t.published.Add(ctx, int64(n), t.adds...)
	t.counts.done.Add(int64(n))
}

func (t instruments) countFailure(ctx context.Context, f failure) {
	t.counts.failed.Add(1)
	if !f.dead {
		t.counts.retried.Add(1)
	}
	t.failed.Add(ctx, 1, t.attributes(attribute.String("class", string(f.class)), attribute.Bool("dead", f.dead)))
}
