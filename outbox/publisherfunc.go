package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

// PublisherFunc publishes with a plain function, for example to an HTTP endpoint or a cloud queue. Set Send or
// SendBatch, and pass a pointer to NewRelay or in RelayConfig.Transports. It needs no closing. Do not change its
// fields after the first message.
//
// The function returns nil if the destination has stored the message. Otherwise it should return a
// [*driver.PublishError]: Unavailable if the destination was not reached or is overloaded, Permanent if it would
// reject the message again. Any other error is Retryable. A panic is Retryable too and costs the message an attempt.
//
// The context ends within RelayConfig.PublishTimeout, and at shutdown. Messages without a result are Unavailable
// then. A call that ignores its context still counts for Concurrency, and delays a shutdown by at most
// ShutdownTimeout. The body and the maps of a message are read-only.
type PublisherFunc struct {
	// Send publishes one message. It must be safe for concurrent use.
	Send func(ctx context.Context, m Message) error
	// SendBatch publishes 1 to BatchSize messages and returns one error for each, in their order. A nil slice means
	// that all are published. If the number of errors is wrong, all messages fail. Messages of one key are never in the
	// same batch. If it panics with several messages, it is called again with each message alone. It must be safe for
	// concurrent use.
	SendBatch func(ctx context.Context, msgs []Message) []error
	// BatchSize is the maximum number of messages per SendBatch. A batch that is not full waits 2 ms for more
	// messages. At most 10,000. Default: 10.
	BatchSize int
	// Concurrency is the maximum number of calls at once, at most 10,000. Default: 16.
	Concurrency int

	start sync.Once
	room  chan struct{} // a token for each message, until its call has returned

	mu    sync.Mutex
	queue []*waitingSend
	calls map[*funcCall]struct{} // running calls
	timer *time.Timer            // starts a batch that is not full; nil: no message waits
	log   journal                // of a relay; nil: none
}

// gatherTime is how long a batch that is not full waits for more messages.
const gatherTime = 2 * time.Millisecond

// waitingSend is one message and its outcome.
type waitingSend struct {
	ctx      context.Context // the relay waits until it ends
	message  Message
	done     func(error)
	answered atomic.Bool
	stop     func() bool // stops watching ctx
}

// answer reports the outcome, once.
func (s *waitingSend) answer(err error) {
	s.stop()
	s.report(err)
}

func (s *waitingSend) report(err error) {
	if s.answered.CompareAndSwap(false, true) {
		s.done(err)
	}
}

// funcCall is a running call of the function.
type funcCall struct {
	sends []*waitingSend
	ended chan struct{}
}

// Publish implements driver.Publisher. It blocks while Concurrency calls, or their batches, are full.
func (p *PublisherFunc) Publish(ctx context.Context, m driver.Message, done func(error)) {
	if err := p.validate(); err != nil {
		done(&driver.PublishError{Class: driver.Unavailable, Err: err})
		return
	}
	p.start.Do(p.prepare)
	if ctx.Err() != nil || !p.enter(ctx) {
		done(unanswered(ctx))
		return
	}
	s := &waitingSend{ctx: ctx, message: messageOf(m), done: done}
	s.stop = context.AfterFunc(ctx, func() { s.report(unanswered(ctx)) })
	p.mu.Lock()
	defer p.mu.Unlock()
	p.queue = append(p.queue, s)
	p.begin(false)
	if len(p.queue) > 0 && p.timer == nil {
		p.timer = time.AfterFunc(gatherTime, p.gathered)
	}
}

// prepare is called once, before the first message.
func (p *PublisherFunc) prepare() {
	p.room = make(chan struct{}, p.concurrency()*p.batchSize())
	p.calls = map[*funcCall]struct{}{}
}

// enter waits for room. It returns false if ctx has ended before.
func (p *PublisherFunc) enter(ctx context.Context) bool {
	select {
	case p.room <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

// unanswered returns the outcome of a message for which nobody waits any more.
func unanswered(ctx context.Context) error {
	return &driver.PublishError{Class: driver.Unavailable, Err: fmt.Errorf("no result yet: %w", context.Cause(ctx))}
}

// messageOf returns the message as it was written.
func messageOf(m driver.Message) Message {
	return Message{
		ID: m.ID, Name: m.Name, Body: m.Body, ContentType: m.ContentType, Headers: m.Headers, Key: m.Key, Transport: m.Transport,
		Route: Route{Exchange: m.Exchange, RoutingKey: m.RoutingKey, Headers: m.RouteHeaders},
	}
}

// gathered starts calls for the messages that have waited for gatherTime.
func (p *PublisherFunc) gathered() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.timer = nil
	p.begin(true)
}

// begin starts calls while messages wait and a call is free. If partial is true, it also starts a batch that is not
// full. The caller holds the lock.
func (p *PublisherFunc) begin(partial bool) {
	for len(p.calls) < p.concurrency() && (partial && len(p.queue) > 0 || len(p.queue) >= p.batchSize()) {
		n := min(len(p.queue), p.batchSize())
		call := &funcCall{sends: p.queue[:n:n], ended: make(chan struct{})}
		p.queue = p.queue[n:]
		p.calls[call] = struct{}{}
		go p.run(call)
	}
	if len(p.queue) == 0 {
		p.queue = nil // frees the messages of earlier calls
	}
}

// run makes one call of the function. If the function exits its goroutine, its messages fail too.
func (p *PublisherFunc) run(call *funcCall) {
	defer func() {
		for _, s := range call.sends {
			s.answer(errors.New("the function exited its goroutine"))
			<-p.room
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.calls, call)
		close(call.ended)
		p.begin(true)
	}()
	sends := make([]*waitingSend, 0, len(call.sends))
	for _, s := range call.sends {
		if !s.answered.Load() {
			sends = append(sends, s)
		}
	}
	if len(sends) == 0 || p.try(sends) || len(sends) == 1 {
		return
	}
	for i, s := range sends { // one of the messages caused the panic
		if !s.answered.Load() {
			p.try(sends[i : i+1])
		}
	}
}

// try calls the function for messages and reports their outcomes. It returns false if the function panicked. It
// reports a panic only for a single message.
func (p *PublisherFunc) try(sends []*waitingSend) (returned bool) {
	ctx, cancel := together(sends)
	defer cancel()
	defer func() {
		switch v := recover(); {
		case v == nil:
		case len(sends) == 1:
			sends[0].answer(&panicError{value: v, stack: debug.Stack()})
		default:
			p.logPanic(ctx, v, len(sends))
		}
	}()
	errs := onePerMessage(p.call(ctx, sends), len(sends))
	for i, s := range sends {
		err := sound(errs[i])
		if _, classed := errors.AsType[*driver.PublishError](err); err != nil && !classed && ctx.Err() != nil {
			err = unanswered(ctx) // the end of the context is not a failure of the message
		}
		s.answer(err)
	}
	return true
}

// onePerMessage returns the errors of a call with n messages. If their number is wrong, they do not show which messages
// failed, so all fail with the same error. If it reports an outage, that costs no attempt.
func onePerMessage(errs []error, n int) []error {
	switch len(errs) {
	case n:
		return errs
	case 0:
		return make([]error, n)
	}
	all := errors.Join(errs...)
	err := fmt.Errorf("SendBatch returned %d errors for %d messages: %v", len(errs), n, all)
	if class := driver.ClassOf(all); pauses(class) {
		err = &driver.PublishError{Class: class, Err: err}
	}
	return slices.Repeat([]error{err}, n)
}

// logTo sets the journal for panics with several messages. The first relay's journal is kept.
func (p *PublisherFunc) logTo(log journal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.log == nil {
		p.log = log
	}
}

// logPanic logs a panic that fails no message by itself.
func (p *PublisherFunc) logPanic(ctx context.Context, v any, messages int) {
	p.mu.Lock()
	log := p.log
	p.mu.Unlock()
	if log != nil {
		log(ctx, slog.LevelError, "outbox: publisher panicked with several messages", "",
			slog.Int("messages", messages), slog.Any("panic", v), slog.String("stack", string(debug.Stack())))
	}
}

// panicError is the failure of a message whose function panicked.
type panicError struct {
	value any
	stack []byte // for the log
}

func (e *panicError) Error() string { return fmt.Sprintf("the function panicked: %v", e.value) }

func (p *PublisherFunc) call(ctx context.Context, sends []*waitingSend) []error {
	if p.Send != nil {
		return []error{p.Send(ctx, sends[0].message)}
	}
	messages := make([]Message, len(sends))
	for i, s := range sends {
		messages[i] = s.message
	}
	return p.SendBatch(ctx, messages)
}

// together returns a context that ends when nobody waits for any of the messages. Its values come from the first
// message.
func together(sends []*waitingSend) (context.Context, context.CancelFunc) {
	if len(sends) == 1 {
		return context.WithCancel(sends[0].ctx)
	}
	ctx, cancel := withDeadlines(sends)
	var waited atomic.Int64
	waited.Store(int64(len(sends)))
	stops := make([]func() bool, len(sends))
	for i, s := range sends {
		stops[i] = context.AfterFunc(s.ctx, func() {
			if waited.Add(-1) == 0 {
				cancel()
			}
		})
	}
	return ctx, func() {
		for _, stop := range stops {
			stop()
		}
		cancel()
	}
}

// withDeadlines returns a context with the latest deadline of the messages, or without a deadline if one of them has
// none.
func withDeadlines(sends []*waitingSend) (context.Context, context.CancelFunc) {
	ctx := context.WithoutCancel(sends[0].ctx)
	var last time.Time
	for _, s := range sends {
		deadline, ok := s.ctx.Deadline()
		if !ok {
			return context.WithCancel(ctx)
		}
		if deadline.After(last) {
			last = deadline
		}
	}
	return context.WithDeadline(ctx, last)
}

// Run implements driver.Service. After the end of ctx, it waits for the running calls.
func (p *PublisherFunc) Run(ctx context.Context) error {
	<-ctx.Done()
	for _, call := range p.running() {
		<-call.ended
	}
	return nil
}

func (p *PublisherFunc) running() []*funcCall {
	p.mu.Lock()
	defer p.mu.Unlock()
	calls := make([]*funcCall, 0, len(p.calls))
	for call := range p.calls {
		calls = append(calls, call)
	}
	return calls
}

// Ready implements driver.Service. It makes no server call: the relay's Ready reports an unavailable destination.
func (p *PublisherFunc) Ready(context.Context) error { return p.validate() }

// Window implements driver.Windowed. It returns the number of messages without a result, and the largest number
// allowed.
func (p *PublisherFunc) Window() (used, size int) {
	p.start.Do(p.prepare)
	return len(p.room), cap(p.room)
}

// validate returns an error for every invalid field. NewRelay calls it.
func (p *PublisherFunc) validate() error {
	var errs []error
	refuse := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf("outbox: PublisherFunc: "+format, args...))
		}
	}
	refuse((p.Send == nil) != (p.SendBatch == nil), "set Send or SendBatch, and not both")
	refuse(p.BatchSize >= 0 && p.BatchSize <= maxBatch, "BatchSize is %d, want 0 to %d", p.BatchSize, maxBatch)
	refuse(p.BatchSize == 0 || p.Send == nil, "BatchSize is for SendBatch")
	refuse(p.Concurrency >= 0 && p.Concurrency <= maxBatch, "Concurrency is %d, want 0 to %d", p.Concurrency, maxBatch)
	return errors.Join(errs...)
}

func (p *PublisherFunc) batchSize() int {
	if p.Send != nil {
		return 1
	}
	return cmp.Or(p.BatchSize, 10)
}

func (p *PublisherFunc) concurrency() int { return cmp.Or(p.Concurrency, 16) }
