package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

// transport is one publisher with its connection and its circuit breaker. Its methods are safe for concurrent use.
type transport struct {
	name      string
	publisher driver.Publisher
	breaker   breaker
	log       journal
}

// run keeps the publisher's connection until ctx ends, if it has one.
func (t *transport) run(ctx context.Context) {
	service, ok := t.publisher.(driver.Service)
	if !ok {
		return
	}
	if err := service.Run(ctx); err != nil || ctx.Err() == nil {
		t.log(ctx, slog.LevelError, "outbox: publisher stopped before its relay", t.name,
			slog.String("transport", t.name), slog.Any("error", err))
	}
}

// watch ends a pause and calls signal each time the publisher is ready again, until stop is called.
func (t *transport) watch(signal func()) (stop func()) {
	p, ok := t.publisher.(driver.Reconnecting)
	if !ok {
		return func() {}
	}
	return p.OnReady(func() {
		t.breaker.reconnected()
		signal()
	})
}

// usable returns nil while the transport is not paused and its publisher is connected.
func (t *transport) usable(ctx context.Context) error {
	err := t.paused()
	if service, ok := t.publisher.(driver.Service); ok {
		err = errors.Join(err, service.Ready(ctx))
	}
	return err
}

// paused returns an error while the transport is paused.
func (t *transport) paused() error {
	if err := t.breaker.paused(); err != nil {
		return fmt.Errorf("outbox: transport %q is %w", t.name, err)
	}
	return nil
}

// stats returns the state of the breaker and the used part of the publisher's window.
func (t *transport) stats() TransportStats {
	s := t.breaker.state()
	if w, ok := t.publisher.(driver.Windowed); ok {
		if used, size := w.Window(); size > 0 {
			s.Window = float64(used) / float64(size)
		}
	}
	return s
}

// publish passes a message to the publisher. A panic of the publisher counts as a failure of the message. It may call
// done several times.
func (t *transport) publish(ctx context.Context, m driver.Message, done func(error)) {
	defer func() {
		if v := recover(); v != nil {
			t.log(ctx, slog.LevelError, "outbox: publisher panicked", t.name,
				slog.Any("id", m.ID), slog.Any("panic", v), slog.String("stack", string(debug.Stack())))
			done(&driver.PublishError{Class: driver.Retryable, Err: fmt.Errorf("publisher panicked: %v", v)})
		}
	}()
	t.publisher.Publish(ctx, m, done)
}

// conclude updates the breaker after a batch that started at begin. down is the outage that the batch met, or nil.
// answered is true if some message of the transport has an outcome.
func (t *transport) conclude(ctx context.Context, begin time.Time, answered bool, down *outage) {
	if down == nil {
		if failures, resumed := t.breaker.end(begin, answered); resumed {
			t.log(ctx, slog.LevelInfo, "outbox: transport resumed", t.name, slog.String("transport", t.name), slog.Int("failures", failures))
		}
		return
	}
	if failures, length, paused := t.breaker.fail(*down, begin); paused {
		t.log(ctx, slog.LevelWarn, "outbox: transport paused", t.name, slog.String("transport", t.name),
			slog.Int("failures", failures), slog.Duration("pause", length), slog.Any("error", down.err))
	}
}

// sender publishes a batch's messages for one transport on its own goroutine, so a transport that blocks does not
// delay the others.
type sender struct {
	transport *transport
	queue     chan int    // indexes of messages; has room for all
	open      int         // queued or in flight, counted by the pipeline
	down      atomic.Bool // the transport is unavailable: release the remaining messages
}

// run sends the queued messages and ends when the queue is closed.
func (s *sender) run(p *pipeline) {
	for i := range s.queue {
		if s.down.Load() || p.send.Err() != nil || p.wait.Err() != nil {
			p.results <- result{index: i, unsent: true}
			continue
		}
		done := p.done(i)
		if err := p.unfit(i); err != nil {
			done(&driver.PublishError{Class: driver.Permanent, Err: fmt.Errorf("invalid message in the store: %w", err)})
			continue
		}
		s.transport.publish(p.wait, p.messages[i], done)
	}
}

// missing is the publisher of a transport that is not registered.
type missing struct{}

func (missing) Publish(_ context.Context, m driver.Message, done func(error)) {
	done(&driver.PublishError{Class: driver.Retryable, Err: fmt.Errorf("the relay has no transport %q", m.Transport)})
}

// transports is a map of transports by name. The name "" is the default transport.
type transports map[string]*transport

// named returns the transport with the name. If there is none, it returns one that rejects every message.
func (ts transports) named(name string) *transport {
	if t, ok := ts[name]; ok {
		return t
	}
	return &transport{name: name, publisher: missing{}}
}

// leftAlone returns the names of the transports that a batch started now must not use.
func (ts transports) leftAlone() []string {
	var names []string
	for name, t := range ts {
		if t.breaker.leftAlone() {
			names = append(names, name)
		}
	}
	return names
}

// nextResume returns the time until the next pause ends; 0 means that no transport is paused.
func (ts transports) nextResume() time.Duration {
	var next time.Duration
	for _, t := range ts {
		if d := t.breaker.resumesIn(); d > 0 && (next == 0 || d < next) {
			next = d
		}
	}
	return next
}

// allPaused returns the time until the first transport resumes if all are paused, else 0.
func (ts transports) allPaused() time.Duration {
	if len(ts.leftAlone()) < len(ts) {
		return 0
	}
	return ts.nextResume()
}

// begin informs the breakers that a batch started at begin has messages of their transports.
func (ts transports) begin(messages []driver.Message, begin time.Time) {
	tried := map[string]bool{}
	for _, m := range messages {
		if t, ok := ts[m.Transport]; ok && !tried[m.Transport] {
			tried[m.Transport] = true
			t.breaker.try(begin)
		}
	}
}

// end updates the breakers after a batch that started at begin.
func (ts transports) end(ctx context.Context, begin time.Time, batch driver.Batch, outcomes []outcome, down map[string]outage) {
	answered := map[string]bool{}
	for i, o := range outcomes {
		name := batch.Messages[i].Transport
		answered[name] = answered[name] || o.done && batch.Unreadable[i] == nil
	}
	for name, ok := range answered {
		t, known := ts[name]
		if !known {
			continue
		}
		if why, isDown := down[name]; isDown {
			t.conclude(ctx, begin, ok, &why)
		} else {
			t.conclude(ctx, begin, ok, nil)
		}
	}
}

// watch calls signal each time a publisher is ready again, until stop is called.
func (ts transports) watch(signal func()) (stop func()) {
	var stops []func()
	for _, t := range ts {
		stops = append(stops, t.watch(signal))
	}
	return func() {
		for _, stop := range stops {
			stop()
		}
	}
}

func (ts transports) stats() map[string]TransportStats {
	all := make(map[string]TransportStats, len(ts))
	for name, t := range ts {
		all[name] = t.stats()
	}
	return all
}

// paused returns the joined errors of all paused transports.
func (ts transports) paused() error {
	var errs []error
	for _, t := range ts {
		errs = append(errs, t.paused())
	}
	return errors.Join(errs...)
}

// pauses reports whether a failure of class c concerns the transport rather than the message.
func pauses(c driver.Class) bool { return c == driver.Unavailable || c == driver.Blocked }

// breaker is the circuit breaker of a publisher. During a pause, no batch uses the publisher. After the pause, one
// batch tries it, and the others wait until that batch has ended. A reconnect ends a pause early.
//
// Its methods are safe for concurrent use.
type breaker struct {
	delay func(failures int) time.Duration // the length of a pause

	mu    sync.Mutex
	pause *pause    // nil: messages flow
	ready time.Time // when the publisher was last ready again
}

// pause is the state of a publisher that failed.
type pause struct {
	failures int // in a row
	since    time.Time
	until    time.Time
	trying   bool
	err      error
}

// outage is the failure of a publisher that ended a batch, and its time.
type outage struct {
	err error
	at  time.Time
}

// leftAlone reports whether a batch started now must not use the transport.
func (b *breaker) leftAlone() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.pause != nil && (b.pause.trying || time.Now().Before(b.pause.until))
}

// resumesIn returns the time until the pause ends; 0 means that there is none or that it has ended.
func (b *breaker) resumesIn() time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.pause == nil {
		return 0
	}
	return max(0, time.Until(b.pause.until))
}

// try records that a batch started at begin has messages of the transport.
func (b *breaker) try(begin time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.pause != nil && !b.pause.since.After(begin) {
		b.pause.trying = true
	}
}

// fail pauses the transport after it failed a batch that started at begin. It ignores a batch that started before the
// current pause. A failure from before the publisher's last reconnect causes a pause of length 0.
func (b *breaker) fail(down outage, begin time.Time) (failures int, length time.Duration, paused bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.pause != nil {
		if b.pause.since.After(begin) {
			return 0, 0, false
		}
		failures = b.pause.failures
	}
	failures++
	length = b.delay(failures)
	if b.ready.After(down.at) {
		length = 0
	}
	now := time.Now()
	b.pause = &pause{failures: failures, since: now, until: now.Add(length), err: down.err}
	return failures, length, true
}

// end records the end of a batch that started at begin. If the transport answered, its pause ends, and failures is
// the number of failures before.
func (b *breaker) end(begin time.Time, answered bool) (failures int, resumed bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.pause == nil || b.pause.since.After(begin) {
		return 0, false
	}
	if !answered {
		b.pause.trying = false
		return 0, false
	}
	failures = b.pause.failures
	b.pause = nil
	return failures, true
}

// forget removes a pause that is over. The relay calls it when no message is left to try the transport with.
func (b *breaker) forget() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.pause != nil && !b.pause.trying && !time.Now().Before(b.pause.until) {
		b.pause = nil
	}
}

// reconnected ends the pause. Failures from before this time cause no further pause.
func (b *breaker) reconnected() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ready = time.Now()
	if b.pause != nil && b.ready.Before(b.pause.until) {
		b.pause.until = b.ready
	}
}

// state returns the breaker's part of a transport's stats.
func (b *breaker) state() TransportStats {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.pause == nil {
		return TransportStats{State: stateClosed}
	}
	s := TransportStats{State: stateProbing, Failures: b.pause.failures, Err: b.pause.err}
	if time.Now().Before(b.pause.until) {
		s.State = statePaused
	}
	return s
}

// paused returns an error while there is a pause.
func (b *breaker) paused() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.pause == nil {
		return nil
	}
	return fmt.Errorf("paused after %d failures: %w", b.pause.failures, b.pause.err)
}
