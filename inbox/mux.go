package inbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/holdfast-go/holdfast/inbox/internal/base"
)

// Handler does the work of one message.
type Handler func(ctx context.Context, m *Message) error

// Mux is a Processor that gives each message to the handler of its name. It does not
// deduplicate. Make it with NewMux and register everything first; then it may be used from
// many goroutines.
type Mux struct {
	routes   map[string]route
	fallback Handler      // nil: a message of no handler's name is refused
	steps    []Middleware // around every message
	limits   map[string]int
}

// route is what a name is registered with.
type route struct {
	decode func(m *Message) (work any, err error)
	steps  []Middleware
}

// errExited is the result of a message whose handler has exited its goroutine.
var errExited = errors.New("inbox: a handler exited its goroutine")

// NewMux returns a Mux without handlers.
func NewMux() *Mux { return &Mux{routes: map[string]route{}, limits: map[string]int{}} }

// Handle registers fn for the messages of a name, their JSON bodies decoded into T: exactly one
// JSON value, not null, of at most 16 MiB, also packed by gzip where ContentEncoding says so, or after a byte order
// mark; members that T does not know are passed over. Anything else makes the message a dead letter of class validation. The same type may be registered under
// several names. The middleware is for this handler only, the first one outermost. It returns the
// errors of Route.
func Handle[T any](m *Mux, name string, fn func(ctx context.Context, v T) error, wrap ...Middleware) error {
	if fn == nil {
		return fmt.Errorf("inbox: handler of %q is nil", name)
	}
	return m.Route(name, func(msg *Message) (any, error) {
		var v T
		if err := base.Decode(msg.ContentType, msg.ContentEncoding, msg.Body, &v); err != nil {
			return nil, Invalid(fmt.Errorf("inbox: decode %T: %w", v, err))
		}
		return func(ctx context.Context) error { return fn(ctx, v) }, nil
	}, wrap...)
}

// Register is Handle for a handler that reads the message itself.
func (m *Mux) Register(name string, h Handler, wrap ...Middleware) error {
	if h == nil {
		return fmt.Errorf("inbox: handler of %q is nil", name)
	}
	return m.Route(name, func(msg *Message) (any, error) { return h.on(msg), nil }, wrap...)
}

// Route registers what makes the Work of a Call: Decode calls it, and its error is the message's
// result. It is for processors that do the work by themselves; Process itself runs functions of the
// type func(context.Context) error. It is an error when the name is none that a message may have
// (see Message.Validate), has a handler already, or decode is nil.
func (m *Mux) Route(name string, decode func(m *Message) (work any, err error), wrap ...Middleware) error {
	_, taken := m.routes[name]
	switch {
	case name == "" || len(name) > base.MaxNameBytes || !base.IsText(name):
		return fmt.Errorf("inbox: handler name %q must have 1 to %d bytes of text", name, base.MaxNameBytes)
	case decode == nil:
		return fmt.Errorf("inbox: handler of %q is nil", name)
	case taken:
		return fmt.Errorf("inbox: %q has a handler already", name)
	}
	m.routes[name] = route{decode, wrap}
	return nil
}

// Fallback registers a handler for the messages that have no handler of their name, in place
// of refusing them as class validation: one that returns nil passes them over, one that
// returns Postpone leaves them to another consumer. Nil refuses again.
func (m *Mux) Fallback(h Handler) { m.fallback = h }

// Use adds middleware around every message, the first one outermost and outside of that of single
// handlers. It also sees the messages that no handler gets, as errors of class validation.
func (m *Mux) Use(wrap ...Middleware) { m.steps = append(m.steps, wrap...) }

// SetLimit bounds how many messages of a name a consumer in this process works on at once, for a
// handler that needs something scarce; the other messages of its queue go on. 0 means no bound but
// ConsumerConfig.Concurrency. It is an error when the limit is negative. Run of a consumer refuses a name that has no
// handler then, unless there is a Fallback.
func (m *Mux) SetLimit(name string, limit int) error {
	if limit < 0 {
		return fmt.Errorf("inbox: limit %d of %q is negative", limit, name)
	}
	m.limits[name] = limit
	return nil
}

// Limit implements driver.Limiter: it returns what SetLimit was given.
func (m *Mux) Limit(name string) int { return m.limits[name] }

// Configured implements driver.Configured: it names each limit of SetLimit that is of no handler.
func (m *Mux) Configured() error {
	if m.fallback != nil {
		return nil
	}
	var problems []error
	for _, name := range slices.Sorted(maps.Keys(m.limits)) {
		if _, ok := m.routes[name]; !ok {
			problems = append(problems, fmt.Errorf("inbox: SetLimit names %q, which has no handler", name))
		}
	}
	return errors.Join(problems...)
}

// Process implements Processor, one message after the other. A panic counts as
// an unmarked error. Results of handlers whose context a draining consumer has cancelled are
// marked with ErrDraining.
func (m *Mux) Process(ctx context.Context, msgs []*Message) []error {
	results := make([]error, len(msgs))
	for i, msg := range msgs {
		m.run(ctx, m.call(msg), &results[i])
	}
	return results
}

func (m *Mux) run(ctx context.Context, c *Call, result *error) {
	*result = errExited
	defer func() { *result = c.End(*result) }() // also when the handler exits its goroutine
	inner, err := c.Begin(ctx)
	if err != nil {
		*result = err
		return
	}
	work, ok := c.Work.(func(context.Context) error)
	if !ok {
		*result = fmt.Errorf("inbox: %T, the work of %q, is for another processor", c.Work, c.Message.Name)
		return
	}
	*result = base.Safely(func() error { return work(inner) })
}

// Decode finds the handlers of messages and decodes their bodies. It runs neither middleware nor
// handlers.
func (m *Mux) Decode(msgs []*Message) []*Call {
	calls := make([]*Call, len(msgs))
	for i, msg := range msgs {
		calls[i] = m.call(msg)
	}
	return calls
}

func (m *Mux) call(msg *Message) *Call {
	c := &Call{Message: msg, steps: m.steps}
	c.err = base.Safely(func() error { return m.find(c) })
	return c
}

// find gives a call its work, and then the middleware of its name.
func (m *Mux) find(c *Call) error {
	if err := c.Message.Validate(); err != nil {
		return err
	}
	r, ok := m.routes[c.Message.Name]
	switch {
	case !ok && m.fallback == nil:
		return Invalid(fmt.Errorf("inbox: no handler for %q", c.Message.Name))
	case !ok:
		c.Work = m.fallback.on(c.Message)
		return nil
	}
	work, err := r.decode(c.Message)
	if err != nil {
		return err
	}
	c.Work = work
	if len(r.steps) > 0 {
		c.steps = append(m.steps[:len(m.steps):len(m.steps)], r.steps...)
	}
	return nil
}

// on is the handler's work on one message.
func (h Handler) on(m *Message) func(context.Context) error {
	return func(ctx context.Context) error { return h(ctx, m) }
}

// Call is one message on its way through its middleware and its handler, as Mux.Decode returns it. A
// processor calls Begin, does the work, and calls End; of several messages that it works on
// together it may begin all first. A Call is for one delivery and one goroutine at a time.
type Call struct {
	// Message is what was given to Decode.
	Message *Message
	// Work is what the function made of it that was given to Mux.Route. Of the other handlers it is
	// a func(context.Context) error, which runs them. It is nil where Begin returns an error.
	Work any

	err   error        // why there is no work
	steps []Middleware // the outermost first

	outer context.Context // that of Begin
	inner context.Context // what the steps have made of it
	ends  []func(err error) error
}

// Begin runs the middleware up to the work. It returns the context for the work. An error is the
// message's result, for End; the work must not be done then.
func (c *Call) Begin(ctx context.Context) (context.Context, error) {
	c.outer, c.inner = ctx, base.NewContext(ctx, c.Message)
	if ctx.Err() != nil {
		return c.inner, fmt.Errorf("%w: not started: %w", ErrDraining, context.Cause(ctx))
	}
	for _, step := range c.steps {
		if err := base.Safely(func() error { return c.enter(step) }); err != nil {
			return c.inner, err
		}
	}
	return c.inner, c.err
}

func (c *Call) enter(step Middleware) error {
	inner, end, err := step(c.inner, c.Message)
	if inner != nil {
		c.inner = inner
	}
	if end != nil {
		c.ends = append(c.ends, end)
	}
	return err
}

// End gives the result to the middleware that has begun, the innermost first, and returns what they
// make of it. Where a draining consumer has cancelled the context an error is marked with ErrDraining.
// Without a Begin it returns the result as it is.
func (c *Call) End(result error) error {
	for i := len(c.ends) - 1; i >= 0; i-- {
		end := c.ends[i]
		c.ends = c.ends[:i] // each runs once, also when it exits the goroutine
		given := result
		if err := base.Safely(func() error { result = end(given); return nil }); err != nil {
			result = err
		}
	}
	if result != nil && c.outer != nil && errors.Is(context.Cause(c.outer), ErrDraining) && !errors.Is(result, ErrDraining) {
		return fmt.Errorf("%w: %w", ErrDraining, result)
	}
	return result
}

// Middleware is a step around each message. It is called before the handler. The context that it
// returns is the handler's, and that of further middleware; nil changes nothing. An error is the
// message's result: what is further in does not run. The function that it returns, if any, is called
// once, when the message has a result, also one of its own; what it returns is the result from then on.
//
// In a batch all messages begin, one after the other, before the first one ends: what one keeps until
// its end, as a mutex, must not be needed by another one's begin. A panic is an error. The message
// must not be changed.
type Middleware func(ctx context.Context, m *Message) (inner context.Context, end func(result error) error, err error)

// Blocking is middleware that waits before each message, holding nothing but the worker, for at most
// half of the time that the context has left: the other half is the handler's. When the wait ends by
// that, or the waiter fails, which is no failure of the message, the message is postponed and
// keeps its attempts; see Postpone. A nil waiter means no wait.
func Blocking(w Waiter) Middleware {
	return func(ctx context.Context, _ *Message) (context.Context, func(error) error, error) {
		if w == nil {
			return nil, nil, nil
		}
		ctx, cancel := halfOf(ctx)
		defer cancel()
		if err := w.Wait(ctx); err != nil {
			return nil, nil, Postpone(fmt.Errorf("inbox: wait for leave to start: %w", err), 0)
		}
		return nil, nil, nil
	}
}

// halfOf bounds a context by half of the time that it has left: a handler that began with what the
// wait has left would fail for want of time, and that would cost the message an attempt.
func halfOf(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, bounded := ctx.Deadline()
	if !bounded {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, time.Until(deadline)/2)
}

// Processor does the work of messages. *Mux is one without deduplication; inboxpgx and
// inboxredis have those with it. Package inboxtest/conformance holds what they promise.
type Processor interface {
	// Process returns one result per message, in the same order. Nil means that the
	// message's effect is durable, or that it was a duplicate of one whose effect is:
	// acknowledge it. Any other result is read by driver.Classify. It may be called from many
	// goroutines at once. Messages whose turn had not come when ctx ended get an error
	// that is ErrDraining.
	Process(ctx context.Context, msgs []*Message) []error
}

// Waiter blocks until the caller may go on: a rate limiter bound to a key, for example.
// It returns an error when ctx ends first, or when it cannot tell.
type Waiter interface {
	Wait(ctx context.Context) error
}
