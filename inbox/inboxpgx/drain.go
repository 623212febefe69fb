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
	// drainers is how many keys a process drains at once.
	drainers = 4

	// drainPoll is the interval of checks for keys that may continue: an operator may use another process.
	drainPoll = 2 * time.Second

	// drainLease is how long a key is reserved for the process that claimed it, until a transaction begins.
	// Steps before the transaction add to it. After a crash another process continues that much later. A live
	// process releases the key before.
	drainLease = 10 * time.Second

	// drainTurn is how many messages of a key run before other keys have a turn.
	drainTurn = 20

	// unavailablePause is how long a key waits after a server was unreachable.
	unavailablePause = 2 * time.Second
)

var errLate = fmt.Errorf("inboxpgx: no transaction started within the lease: %w", inbox.ErrDraining)

// drain processes the messages of stopped keys that may continue. One goroutine claims keys, and drainers run
// them.
type drain struct {
	s      *Store
	p      *parks
	cfg    inbox.ConsumerConfig
	kit    telemetry.Kit
	seldom telemetry.Seldom
	halted atomic.Bool // by an operator, or not known yet

	slots chan struct{} // a slot for each running key; a message that runs alone takes all
	alone atomic.Bool   // the next message runs alone

	strikes sync.Map // strike by key: its message failed because a server was unreachable
}

// claim is a head, and the time at which a message that has not started is released.
type claim struct {
	*driver.Head
	until time.Time
}

// strike counts how often a message failed because a server was unreachable while others succeeded.
type strike struct {
	n      int
	passed int64 // as of the last failure
}

// drain runs until ctx ends. Then it waits for running handlers, for at most ShutdownTimeout.
func (s *Store) drain(ctx context.Context) {
	cfg := s.parks.cfg.Load()
	if cfg == nil {
		return
	}
	d := &drain{
		s: s, p: s.parks, cfg: *cfg, slots: make(chan struct{}, drainers),
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
	for {
		n, alone := 1, d.alone.Load()
		if alone {
			n = drainers
		}
		for range n {
			select {
			case d.slots <- struct{}{}:
			case <-ctx.Done():
			}
		}
		if ctx.Err() != nil {
			return
		}
		c := d.claim(work)
		if c.Head == nil {
			d.alone.Store(false)
			d.leave(n)
			d.rest(ctx)
			continue
		}
		running.Go(func() {
			defer d.leave(n)
			d.key(ctx, work, c, alone)
		})
	}
}

// leave frees slots of keys.
func (d *drain) leave(n int) {
	for range n {
		<-d.slots
	}
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

// lease returns the lease. It is longer if handlers have steps before their transactions, because nothing
// locks the key meanwhile.
func (d *drain) lease() time.Duration {
	if d.s.slow {
		return d.p.lease + d.cfg.HandlerTimeout
	}
	return d.p.lease
}

func (d *drain) claim(ctx context.Context) (c claim) {
	if d.halted.Load() {
		return c
	}
	c.until = d.until()
	h, err := d.p.place.Claim(ctx, d.lease())
	d.complain("could not read stopped keys", err)
	c.Head = h
	return c
}

// until returns when a message claimed now is released.
func (d *drain) until() time.Time { return time.Now().Add(d.lease() - d.p.lease/5) }

// key runs messages of a key until one fails, none is left, or other keys have their turn.
func (d *drain) key(ctx, work context.Context, c claim, alone bool) {
	keep := context.WithoutCancel(work) // the outcome of a message is stored even during a shutdown
	if alone {
		defer d.alone.Store(false)
	}
	for n := 1; c.Head != nil; n++ {
		over := n > drainTurn || ctx.Err() != nil || d.halted.Load() || n > 1 && d.alone.Load()
		if suspect := c.Runs > 0 && c.Runs < d.cfg.MaxCrashes && !alone; suspect {
			d.alone.Store(true)
			over = true
		}
		if over || c.Message == nil {
			d.complain("could not release a stopped key", d.p.place.Release(keep, c.Head))
			d.p.goOn()
			return
		}
		if err := d.message(work, c); err != nil {
			d.failed(keep, c.Head, err)
			return
		}
		d.strikes.Delete(c.Key)
		var err error
		c.until = d.until()
		c.Head, err = d.p.place.Next(keep, c.Head, d.lease())
		d.complain("could not read a stopped key", err)
	}
}

// message runs the message of a claim. It is released if it has not started when the lease is almost over.
// Otherwise another process would count it as one that ended this process.
func (d *drain) message(ctx context.Context, c claim) error {
	if c.Runs >= d.cfg.MaxCrashes {
		return inbox.Classed(inbox.Unrecoverable(fmt.Errorf(
			"inboxpgx: the process ended %d times while this message was being processed", c.Runs)), inboxdriver.ClassQuarantined)
	}
	ctx, end := d.span(ctx, c.Message)
	ctx, cancel := context.WithTimeoutCause(ctx, d.cfg.HandlerTimeout, errTimeout)
	defer cancel()
	ctx, giveUp := context.WithCancelCause(ctx)
	late := time.AfterFunc(time.Until(c.until), func() { giveUp(errLate) })
	defer late.Stop()
	err := errExited
	apart(func() { d.s.first(ctx, c.Head, func() { late.Stop() }, &err) })
	end(err)
	return err
}

// first processes the first message of a stopped key, and calls begun when its transaction has started. It
// sets the result even if a handler exits the goroutine.
func (s *Store) first(ctx context.Context, h *driver.Head, begun func(), result *error) {
	m := *h.Message
	m.Redelivered = true // it may have run before, and ended the process
	msgs := []*inbox.Message{&m}
	defer s.slots.take(ctx, msgs)()
	b := &member{call: s.mux.Decode(msgs)[0], result: errExited, head: h, begun: begun}
	defer func() { *result = b.call.End(b.result) }()
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
	default: // it is released: the process ends, or no transaction has started
		err = place.Release(ctx, h)
	}
	if !f.Unavailable {
		d.strikes.Delete(h.Key)
	}
	d.complain("could not store the outcome of a waiting message", err)
}

func advanced(m *inbox.Message, next inboxdriver.Progress) *inbox.Message {
	later := *m
	later.Attempt, later.Recovered, later.FirstFailedAt, later.History = next.Attempt, next.Recovered, next.FirstFailedAt, next.History
	return &later
}

// guilty reports whether a message that fails because a server is unreachable is itself at fault: others
// succeeded between its failures, twice.
func (d *drain) guilty(h *driver.Head) bool {
	passed := d.s.passed.Load()
	known, _ := d.strikes.Load(h.Key)
	last, failed := known.(strike)
	if failed && passed > last.passed {
		last.n++
	}
	d.strikes.Store(h.Key, strike{last.n, passed})
	return last.n >= 2
}

// span starts the span of a message in the sender's trace; the returned function ends it.
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
