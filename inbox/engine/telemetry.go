package engine

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/telemetry"
)

// settledAs is the outcome of a delivery, an attribute of the metric.
type settledAs string

const (
	acked      settledAs = "acked"
	retried    settledAs = "retried" // it failed and is redelivered as its next attempt
	putOff     settledAs = "put_off" // it did not fail and is redelivered, uncounted
	dead       settledAs = "dead"
	returned   settledAs = "returned"   // requeued
	displaced  settledAs = "displaced"  // behind the others: a destination rejected it, or it is a suspect
	superseded settledAs = "superseded" // outdated: its retry was already stored
	stale      settledAs = "stale"      // its session had ended, so the broker redelivers it
)

// maxLabels bounds how many classes the counter distinguishes.
const maxLabels = 100

// instruments are the metrics and spans of a consumer.
type instruments struct {
	cfg      *settings
	kit      telemetry.Kit
	consumer metric.MeasurementOption
	settled  metric.Int64Counter
	sessions metric.Int64Counter
	hanging  metric.Int64Counter
	duration metric.Float64Histogram
	inFlight metric.Int64ObservableUpDownCounter // the sum of all consumers with one name and queue, like held
	held     metric.Int64ObservableUpDownCounter
	depths   *depths

	nowInFlight, nowWaiting atomic.Int64
	done, failed, repeated  atomic.Int64 // deliveries, for Counts

	mu     sync.Mutex
	labels map[label]metric.MeasurementOption // created once, because they are used with every message
}

type label struct {
	as    settledAs
	class string // of a failure; empty: none
}

func newInstruments(cfg *settings, source driver.Source) (*instruments, error) {
	kit := telemetry.New("github.com/holdfast-go/holdfast/inbox/"+cfg.Package, cfg.TracerProvider, cfg.MeterProvider)
	settled, err1 := kit.Meter.Int64Counter(cfg.metric("settled"),
		metric.WithDescription("Deliveries by the way they were settled"))
	sessions, err2 := kit.Meter.Int64Counter(cfg.metric("lost_sessions"),
		metric.WithDescription("Sessions with the broker that failed or could not be opened"))
	hanging, err3 := kit.Meter.Int64Counter(cfg.metric("stuck"),
		metric.WithDescription("Handlers that did not return in time"))
	inFlight, err4 := kit.Meter.Int64ObservableUpDownCounter(cfg.metric("in_hand"),
		metric.WithDescription("Messages that were received and are not settled"))
	held, err5 := kit.Meter.Int64ObservableUpDownCounter(cfg.metric("held"),
		metric.WithDescription("Messages in flight that wait for a retry, for a limit or to be moved"))
	depths, err6 := newDepths(cfg, source, kit.Meter)
	duration, err7 := kit.Meter.Float64Histogram(cfg.metric("process.duration"),
		metric.WithDescription("Duration of one attempt of the processor at a message or a batch"), metric.WithUnit("s"), telemetry.Seconds)
	s := &instruments{
		cfg: cfg, kit: kit, settled: settled, sessions: sessions, hanging: hanging, duration: duration,
		inFlight: inFlight, held: held, depths: depths,
		consumer: cfg.attributes(),
		labels:   map[label]metric.MeasurementOption{},
	}
	return s, errors.Join(err1, err2, err3, err4, err5, err6, err7)
}

// observe reports the gauges until the returned function is called.
func (s *instruments) observe() (stop func()) {
	registration, err := s.kit.Meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		o.ObserveInt64(s.inFlight, s.nowInFlight.Load(), s.consumer)
		o.ObserveInt64(s.held, s.nowWaiting.Load(), s.consumer)
		return nil
	}, s.inFlight, s.held)
	if err != nil {
		return func() {}
	}
	return func() { _ = registration.Unregister() }
}

// count counts settled deliveries. Class is the class of their failure, if they failed.
func (s *instruments) count(as settledAs, class string, n int) {
	if n <= 0 {
		return
	}
	s.settled.Add(context.Background(), int64(n), s.label(as, class))
	switch as {
	case acked:
		s.done.Add(int64(n))
	case retried:
		s.failed.Add(int64(n))
		s.repeated.Add(int64(n))
	case dead:
		s.failed.Add(int64(n))
	}
}

func (s *instruments) label(as settledAs, class string) metric.MeasurementOption {
	s.mu.Lock()
	defer s.mu.Unlock()
	if class != "" && !s.cfg.classes[class] && len(s.labels) > maxLabels {
		class = "other"
	}
	known := s.labels[label{as, class}]
	if known == nil {
		attrs := []attribute.KeyValue{attribute.String("outcome", string(as))}
		if class != "" {
			attrs = append(attrs, attribute.String("class", class))
		}
		known = s.cfg.attributes(attrs...)
		s.labels[label{as, class}] = known
	}
	return known
}

func (s *instruments) stuck() { s.hanging.Add(context.Background(), 1, s.consumer) }

func (s *instruments) lost() { s.sessions.Add(context.Background(), 1, s.consumer) }

// clock measures an attempt until the returned function is called.
func (s *instruments) clock(ctx context.Context) (stop func()) {
	if !s.duration.Enabled(ctx) {
		return func() {}
	}
	begin := time.Now()
	return func() { s.duration.Record(ctx, time.Since(begin).Seconds(), s.consumer) }
}

// span starts a span for processing messages; the returned function ends it. It is linked to the senders'
// spans. The span of a single message is a child in its sender's trace.
func (s *instruments) span(ctx context.Context, msgs []*inbox.Message) (context.Context, func([]error)) {
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
		attribute.String("messaging.system", s.cfg.traits.System),
		attribute.String("messaging.destination.name", msgs[0].Queue),
	}
	if len(msgs) == 1 {
		if len(links) == 1 {
			ctx = trace.ContextWithRemoteSpanContext(ctx, links[0].SpanContext)
		}
		attrs = append(attrs, telemetry.Operation("process")...)
		attrs = append(attrs, attribute.String("messaging.message.id", msgs[0].ID.String()), attribute.Int("holdfast.attempt", msgs[0].Attempt))
	} else {
		attrs = append(attrs, attribute.Int("messaging.batch.message_count", len(msgs)))
	}
	ctx, span := s.kit.Tracer.Start(ctx, "process "+msgs[0].Queue,
		trace.WithSpanKind(trace.SpanKindConsumer), trace.WithLinks(links...), trace.WithAttributes(attrs...))
	return ctx, func(results []error) {
		for _, err := range results {
			if err != nil {
				class := driver.Classify(err).Class
				span.SetAttributes(attribute.String("error.type", class))
				span.SetStatus(codes.Error, class)
				break
			}
		}
		span.End()
	}
}

const (
	// depthAge is the maximum age of the counts of messages on the server while the gauges are read.
	depthAge = time.Minute

	// depthPoll is the interval of checks whether the gauges are read.
	depthPoll = 5 * time.Second

	// depthTimeout bounds one count.
	depthTimeout = 10 * time.Second
)

// depths has the numbers of dead letters and of messages that no consumer has. A goroutine counts them while the gauges
// are read. The gauges return the last counts, because a broker may be slow.
type depths struct {
	cfg      *settings
	letters  driver.DeadLetters // nil: the source has no access to them
	measured driver.Measured    // nil: the source does not count
	meter    metric.Meter
	dead     metric.Int64ObservableGauge
	backlog  metric.Int64ObservableGauge
	read     atomic.Bool // since the last count
	counts   atomic.Pointer[[]driver.Depth]
	waiting  atomic.Pointer[driver.Backlog]
	seldom   telemetry.Seldom
}

func newDepths(cfg *settings, source driver.Source, meter metric.Meter) (*depths, error) {
	d := &depths{cfg: cfg, meter: meter}
	if keeper, ok := source.(driver.Keeper); ok {
		d.letters = cfg.deadLetters(keeper.DeadLetters())
	}
	d.measured, _ = source.(driver.Measured)
	var err1, err2 error
	d.dead, err1 = meter.Int64ObservableGauge(cfg.metric("dead_letters"),
		metric.WithDescription("Dead letters of the consumer's queues, by class; counted about once a minute"))
	d.backlog, err2 = meter.Int64ObservableGauge(cfg.metric("backlog"),
		metric.WithDescription("Messages that no consumer has, by state: waiting, retrying or put_off; counted about once a minute"))
	return d, errors.Join(err1, err2)
}

// observe reports the latest counts.
func (d *depths) observe(_ context.Context, o metric.Observer) error {
	d.read.Store(true)
	if counts := d.counts.Load(); counts != nil {
		for _, depth := range *counts {
			o.ObserveInt64(d.dead, int64(depth.Messages), d.cfg.attributes(attribute.String("class", depth.Class)))
		}
	}
	if b := d.waiting.Load(); b != nil {
		for state, n := range map[string]int{"waiting": b.Waiting, "retrying": b.Retrying, "put_off": b.PutOff} {
			o.ObserveInt64(d.backlog, int64(n), d.cfg.attributes(attribute.String("state", state)))
		}
	}
	return nil
}

// run counts, and reports the gauges, until ctx ends.
func (d *depths) run(ctx context.Context) {
	if d.letters == nil && d.measured == nil {
		return
	}
	defer d.counts.Store(nil)
	defer d.waiting.Store(nil)
	if registration, err := d.meter.RegisterCallback(d.observe, d.dead, d.backlog); err == nil {
		defer func() { _ = registration.Unregister() }()
	}
	for pause := depthPoll; runloop.Sleep(ctx, pause) == nil; {
		pause = depthPoll
		if d.read.Swap(false) {
			d.count(ctx)
			pause = depthAge
		}
	}
}

// byClass counts the dead letters by class, and reports whether another session may have more in flight. It
// returns nil if the source has no access to them.
func (d *depths) byClass(ctx context.Context) (dead map[string]int, held bool, err error) {
	if d.letters == nil {
		return nil, false, nil
	}
	counts, err := d.letters.Depths(ctx)
	if err != nil {
		return nil, false, err
	}
	dead = map[string]int{}
	for _, depth := range counts {
		dead[depth.Class] += depth.Messages
		held = held || depth.Held
	}
	return dead, held, nil
}

// count counts. It keeps no number that could not be counted, because an outdated one would be worse.
func (d *depths) count(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, depthTimeout)
	defer cancel()
	var counts []driver.Depth
	var backlog driver.Backlog
	var err1, err2 error
	if d.letters != nil {
		counts, err1 = d.letters.Depths(ctx)
	}
	if d.measured != nil {
		backlog, err2 = d.measured.Backlog(ctx)
	}
	d.counts.Store(known(counts, err1))
	d.waiting.Store(known(backlog, err2))
	if err := errors.Join(err1, err2); err != nil {
		if repeats, ok := d.seldom.Due(); ok {
			d.cfg.Logger.WarnContext(ctx, "could not count messages", slog.Any("error", err), slog.Int("repeats", repeats))
		}
	}
}

// known returns a value, or nil if there is an error.
func known[T any](v T, err error) *T {
	if err != nil {
		return nil
	}
	return &v
}

// condition has the inputs of readiness. The loop compares it in every turn.
type condition struct {
	paused, draining, session bool
	halted                    bool
	ends                      int // of sessions
	stuck                     int // handlers that ignore cancellation
	full                      bool
	rejects                   string    // the destination that rejects failed messages,
	until                     time.Time // which counts until then
}

// readiness is a condition as an error.
type readiness struct {
	err     error
	refused error
	until   time.Time
}

// status makes a consumer's readiness visible to other goroutines.
type status struct {
	cfg   *settings
	last  condition
	shown atomic.Pointer[readiness]
}

// update publishes the state of a loop.
func (s *status) update(l *loop) {
	c := condition{
		paused: l.outage.paused(), draining: l.drain.on, session: l.link.started, ends: l.link.ends,
		halted: l.outage.halted && l.outage.told,
		stuck:  l.overruns.stuck, full: l.inflight.full(),
	}
	var refused error
	c.rejects, c.until, refused = l.outbound.refusals.latest()
	s.show(c, l.link.err, l.outage.cause, refused)
	l.meters.nowInFlight.Store(int64(l.inflight.all.n))
	l.meters.nowWaiting.Store(int64(l.inflight.waiting.n))
}

// show publishes a condition if it has changed. Session is the cause of a missing session, pause the cause of
// a pause, and refused the cause of rejected messages.
func (s *status) show(c condition, session, pause, refused error) {
	if s.last == c && s.shown.Load() != nil {
		return
	}
	s.last = c
	r := &readiness{}
	switch {
	case c.draining:
		r.err = s.cfg.errorf("%w", runloop.NotRunning("draining"))
	case c.halted: // an operator paused it, so it could work
	case !c.session && session != nil:
		r.err = s.cfg.errorf("no session with the broker: %w", session)
	case !c.session:
		r.err = s.cfg.errorf("no session with the broker")
	case c.paused && pause != nil:
		r.err = s.cfg.errorf("paused: dependency unavailable: %w", pause)
	case c.paused:
		r.err = s.cfg.errorf("paused: dependency unavailable")
	case c.stuck > 0:
		r.err = s.cfg.errorf("%d handlers ignore cancellation", c.stuck)
	case c.full && c.rejects != "":
		r.err = s.cfg.errorf("waiting messages fill the window: %s rejects messages: %w", c.rejects, refused)
	case c.full:
		r.err = s.cfg.errorf("failed messages that wait fill the window")
	}
	if c.rejects != "" {
		r.refused, r.until = s.cfg.errorf("%s rejects messages: %w", c.rejects, refused), c.until
	}
	s.shown.Store(r)
}

// ready returns the reason why a consumer is not ready, or nil.
func (s *status) ready(ctx context.Context, source func(context.Context) error) error {
	r := s.shown.Load()
	switch {
	case r == nil:
		return s.cfg.errorf("no session with the broker")
	case r.err != nil:
		return r.err
	}
	if err := source(ctx); err != nil {
		return s.cfg.errorf("moving failed messages: %w", err)
	}
	if r.refused != nil && time.Now().Before(r.until) {
		return r.refused
	}
	return nil
}
