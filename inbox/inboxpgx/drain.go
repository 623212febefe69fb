package inboxpgx

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
	"go.opentelemetry.io/otel/trace"

	"github.com/holdfast-go/holdfast/inbox"
	inboxdriver "github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx/driver"
	"github.com/holdfast-go/holdfast/inbox/internal/base"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/telemetry"
)

const (
	// drainers is how many keys go on at once in one process.
	drainers = 4

	// drainPoll is how often keys are looked for that may go on: an operator may use another process.
	drainPoll = 2 * time.Second

	// drainLease is how long a key is left to the process that has claimed it and has not begun a transaction, beside
	// the time of steps before the transaction. So late another process goes on after a crash.
	drainLease = 10 * time.Second

	// drainTurn is how many messages of a key run before other keys have a turn.
	drainTurn = 20

	// unavailablePause is how long a key waits when a server was missing.
	unavailablePause = 2 * time.Second
)

// drain processes the messages of stopped keys that may go on. One goroutine claims keys, and drainers run them.
type drain struct {
	s      *Store
	p      *parks
	cfg    inbox.ConsumerConfig
	kit    telemetry.Kit
	seldom telemetry.Seldom
	halted atomic.Bool // by an operator, or that is not known yet

	beside    chan struct{} // a place for each message that runs; one that runs alone has all
	turnstile chan struct{} // to these

	mu      sync.Mutex
	held    map[string]bool   // keys that go on in this process
	strikes map[string]strike // of keys whose messages failed because a server was missing
}

// strike says how often a message failed because a server was missing while others went through.
type strike struct {
	n      int
	passed int64 // as of the last failure
}

// drain runs until ctx ends. It then waits for running handlers, for ShutdownTimeout at most.
func (s *Store) drain(ctx context.Context) {
	cfg := s.parks.cfg.Load()
	if cfg == nil {
		return
	}
	d := &drain{
		s: s, p: s.parks, cfg: *cfg, held: map[string]bool{}, strikes: map[string]strike{},
		beside: make(chan struct{}, drainers), turnstile: make(chan struct{}, 1),
		kit: telemetry.New(scope, cfg.TracerProvider, s.cfg.MeterProvider),
	}
	d.halted.Store(true)
	work, abort := context.WithCancelCause(context.WithoutCancel(ctx))
	defer abort(nil)
	defer context.AfterFunc(ctx, func() {
		_ = runloop.Sleep(work, cfg.ShutdownTimeout-min(cfg.ShutdownTimeout/10, 6*time.Second))
		abort(inbox.ErrDraining)
	})()
	var running sync.WaitGroup
	defer running.Wait()
	running.Go(func() {
		s.WatchPause(ctx, func(by inboxdriver.Pause) {
			d.halted.Store(!by.Since.IsZero())
			d.p.goOn()
		})
	})
	running.Go(func() { d.count(ctx) })
	if observed, err := s.parks.observe(d.kit, s.count.consumer); err == nil {
		defer observed()
	}
	slots := make(chan struct{}, drainers)
	for {
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			return
		}
		h := d.claim(work)
		if h == nil {
			<-slots
			d.rest(ctx)
			continue
		}
		if !d.hold(h.Key) { // its message waits for a connection longer than the lease: that is no run
			if h.Message != nil {
				d.complain("could not give up a waiting message", d.p.place.Retry(work, h, h.Message, d.lease()))
			}
			<-slots
			continue
		}
		running.Go(func() {
			defer func() { <-slots }()
			defer d.letGo(h.Key)
			d.key(ctx, work, h)
		})
	}
}

// hold notes that a key goes on in this process; false: it does already.
func (d *drain) hold(key string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.held[key] {
		return false
	}
	d.held[key] = true
	return true
}

func (d *drain) letGo(key string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.held, key)
}

func (d *drain) rest(ctx context.Context) {
	timer := time.NewTimer(d.p.poll)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-d.p.wake:
	case <-timer.C:
	}
}

func (d *drain) count(ctx context.Context) {
	for runloop.Sleep(ctx, parkedCount) == nil {
		d.complain("could not count waiting messages", d.p.count(ctx, d.cfg.MaxParked))
	}
}

// lease is longer where handlers have steps before their transactions: nothing locks the key meanwhile.
func (d *drain) lease() time.Duration {
	if d.s.slow {
		return d.p.lease + d.cfg.HandlerTimeout
	}
	return d.p.lease
}

func (d *drain) claim(ctx context.Context) *driver.Head {
	if d.halted.Load() {
		return nil
	}
	h, err := d.p.place.Claim(ctx, d.lease())
	d.complain("could not read stopped keys", err)
	return h
}

// key runs messages of a key until one fails, none is left, or others shall have their turn.
func (d *drain) key(ctx, work context.Context, h *driver.Head) {
	for n := 1; h != nil; n++ {
		over := ctx.Err() != nil || d.halted.Load()
		switch {
		case h.Message == nil:
			d.release(work, h)
			return
		case over: // the claim does not count as a run
			d.complain("could not give up a waiting message", d.p.place.Retry(work, h, h.Message, 0))
			return
		}
		err := d.message(work, h)
		switch {
		case errors.Is(err, errNotFirst): // neither does it, unless another process has the message
			d.complain("could not give up a waiting message", d.p.place.Retry(work, h, h.Message, drainLease))
			return
		case err != nil:
			d.failed(work, h, err)
			return
		}
		d.clear(h)
		if n == drainTurn || ctx.Err() != nil {
			d.release(work, h)
			return
		}
		h, err = d.p.place.Next(work, h, d.lease())
		d.complain("could not read a stopped key", err)
	}
}

func (d *drain) release(ctx context.Context, h *driver.Head) {
	d.complain("could not release a stopped key", d.p.place.Release(ctx, h))
	d.p.goOn()
}

// message runs the message of a head. One that may have ended the process before runs alone.
func (d *drain) message(ctx context.Context, h *driver.Head) error {
	switch {
	case h.Runs >= d.cfg.MaxCrashes:
		return inbox.Classed(inbox.Unrecoverable(fmt.Errorf(
			"inboxpgx: the process ended %d times while this message was being processed", h.Runs)), inboxdriver.ClassQuarantined)
	case h.Runs > 0:
		defer d.places(drainers)()
	default:
		defer d.places(1)()
	}
	ctx, end := d.span(ctx, h.Message)
	ctx, cancel := context.WithTimeoutCause(ctx, d.cfg.HandlerTimeout, errTimeout)
	defer cancel()
	err := errExited
	ran := make(chan struct{})
	go func() { // which a handler may exit
		defer close(ran)
		d.s.first(ctx, h, &err)
	}()
	<-ran
	end(err)
	return err
}

// places waits for so many of the drainers' places, and returns a function that gives them back.
func (d *drain) places(n int) (giveBack func()) {
	d.turnstile <- struct{}{} // one after the other: two suspects must not wait for each other
	for range n {
		d.beside <- struct{}{}
	}
	<-d.turnstile
	return func() {
		for range n {
			<-d.beside
		}
	}
}

// first processes the first message of a stopped key. It sets the result also when a handler exits the goroutine.
func (s *Store) first(ctx context.Context, h *driver.Head, result *error) {
	m := *h.Message
	m.Redelivered = true // it may have run before, and ended the process
	msgs := []*inbox.Message{&m}
	defer s.slots.take(ctx, msgs)()
	b := &member{call: s.mux.Decode(msgs)[0], result: errExited, head: h}
	defer func() {
		if b.result == nil && b.work.one == nil { // no transaction has removed it
			b.result = s.parks.place.Pass(ctx, h)
		}
		*result = b.call.End(b.result)
	}()
	b.begin(ctx)
	s.single(b)
}

// failed decides about a message that was not processed.
func (d *drain) failed(ctx context.Context, h *driver.Head, err error) {
	now := time.Now()
	f := inboxdriver.Classify(err)
	if f.Unavailable && d.guilty(h) {
		f.Action, f.Counted, f.Unavailable = inboxdriver.ActionRetry, true, false
	}
	decision := inboxdriver.Next(d.cfg.Retry, h.Message, f, now, d.cfg.Rand())
	d.logFailure(h.Message, f, decision)
	place := d.p.place
	switch {
	case decision.Action == inboxdriver.ActionDead:
		err = place.Fail(ctx, h, inboxdriver.NewDeadLetter(h.Message, f, d.cfg.Name, now))
	case decision.Action == inboxdriver.ActionRetry:
		err = place.Retry(ctx, h, advanced(h.Message, inboxdriver.Progressed(h.Message, f, decision, d.cfg.Name, now)), decision.Delay)
	case f.Unavailable:
		err = place.Retry(ctx, h, h.Message, unavailablePause)
	default: // it was given back by a process that ends
		err = place.Retry(ctx, h, h.Message, 0)
	}
	if !f.Unavailable {
		d.clear(h)
	}
	d.complain("could not store the outcome of a waiting message", err)
}

func advanced(m *inbox.Message, next inboxdriver.Progress) *inbox.Message {
	later := *m
	later.Attempt, later.Recovered, later.FirstFailedAt, later.History = next.Attempt, next.Recovered, next.FirstFailedAt, next.History
	return &later
}

// guilty reports whether a message that fails because a server is missing fails by itself: others went through between
// its failures, twice.
func (d *drain) guilty(h *driver.Head) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	passed := d.s.passed.Load()
	last, known := d.strikes[h.Key]
	if known && passed > last.passed {
		last.n++
	}
	d.strikes[h.Key] = strike{last.n, passed}
	return last.n >= 2
}

func (d *drain) clear(h *driver.Head) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.strikes, h.Key)
}

// span begins the processing of a message, as a part of the sender's trace; the returned function ends it.
func (d *drain) span(ctx context.Context, m *inbox.Message) (context.Context, func(error)) {
	if d.kit.Silent() {
		return ctx, func(error) {}
	}
	if sender := telemetry.Extract(ctx, m.Headers); sender.IsValid() {
		ctx = trace.ContextWithRemoteSpanContext(ctx, sender)
	}
	attrs := append(telemetry.Operation("process"), attribute.String("messaging.destination.name", m.Queue),
		attribute.String("messaging.message.id", m.ID.String()), attribute.Int("holdfast.attempt", m.Attempt))
	ctx, span := d.kit.Tracer.Start(ctx, "process "+m.Queue, trace.WithSpanKind(trace.SpanKindConsumer), trace.WithAttributes(attrs...))
	return ctx, func(err error) {
		if err != nil {
			class := inboxdriver.Classify(err).Class
			span.SetAttributes(attribute.String("error.type", class))
			span.SetStatus(codes.Error, class)
		}
		span.End()
	}
}

func (d *drain) logFailure(m *inbox.Message, f inboxdriver.Failure, decision inboxdriver.Decision) {
	attrs := []any{
		"message_id", m.ID, "name", m.Name, "queue", m.Queue, "attempt", m.Attempt,
		"class", f.Class, "action", decision.Action.String(), "error", f.Err,
	}
	if panicked, ok := errors.AsType[*base.Panic](f.Err); ok {
		attrs = append(attrs, slog.String("stack", string(panicked.Stack)))
	}
	d.cfg.Logger.Warn("message not processed", attrs...)
}

func (d *drain) complain(what string, err error) {
	if err == nil {
		return
	}
	if repeats, ok := d.seldom.Due(); ok {
		d.cfg.Logger.Warn(what, slog.String("consumer", d.s.consumer), slog.Any("error", err), slog.Int("repeats", repeats))
	}
}
