package inbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/inbox/internal/base"
)

// Handler does the work of one message.
type Handler func(ctx context.Context, m *Message) error

// Mux is a Processor that calls the handler registered for each message's name. It does not deduplicate.
// Create it with NewMux and register all handlers first. After that it is safe for concurrent use.
type Mux struct {
	routes   map[string]route
	fallback Handler      // nil: reject messages without a handler
	steps    []Middleware // around every message
	limits   map[string]int
	decode   func(m *Message, v any) error // nil: DecodeJSON
}

// route is the registration of one name.
type route struct {
	decode func(m *Message) (work any, err error)
	steps  []Middleware
}

// errExited is the result of a message whose handler exited its goroutine.
var errExited = errors.New("inbox: a handler exited its goroutine")

// NewMux returns a Mux without handlers.
func NewMux() *Mux { return &Mux{routes: map[string]route{}, limits: map[string]int{}} }

// Handle registers fn for the messages of a name and decodes their bodies into T, by DecodeJSON or the function
// of SetDecode. A body that cannot be decoded makes the message a dead letter of class validation. One type may
// be registered under several names. The middleware is for this handler only, outermost first. Handle returns
// the errors of Route.
func Handle[T any](m *Mux, name string, fn func(ctx context.Context, v T) error, wrap ...Middleware) error {
	if fn == nil {
		return fmt.Errorf("inbox: handler of %q is nil", name)
	}
	return m.Route(name, func(msg *Message) (any, error) {
		v, err := base.Into[T](func(v any) error { return m.DecodeBody(msg, v) })
		if err != nil {
			return nil, err
		}
		return func(ctx context.Context) error { return fn(ctx, v) }, nil
	}, wrap...)
}

// Register registers a handler that reads the message itself. See Handle for the middleware and the errors.
func (m *Mux) Register(name string, h Handler, wrap ...Middleware) error {
	if h == nil {
		return fmt.Errorf("inbox: handler of %q is nil", name)
	}
	return m.Route(name, func(msg *Message) (any, error) { return h.on(msg), nil }, wrap...)
}

// Route registers the function that decodes the messages of a name. Decode calls it to set Call.Work; its
// error is the result of the message. Processors with work of their own use Route: Process runs only work of
// the type func(context.Context) error. Route returns an error if a message cannot have the name (see
// Message.Validate), if the name has a handler already, or if decode is nil.
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

// Fallback registers a handler for messages without a handler of their own. Without a fallback they fail with
// class validation. A fallback that returns nil skips them; one that returns Postpone leaves them to another
// consumer. Nil removes the fallback.
func (m *Mux) Fallback(h Handler) { m.fallback = h }

// SetDecode replaces DecodeJSON for the handlers of Handle, for formats such as protobuf. decode gets the message
// with its body unpacked, and a pointer to a new T; if T is a pointer, it gets a T. It may call DecodeJSON for some
// content types. An unmarked error is of class validation; its text is kept with the dead letter and should not
// quote the body. decode runs on many goroutines. Nil restores DecodeJSON.
func (m *Mux) SetDecode(decode func(m *Message, v any) error) { m.decode = decode }

// DecodeBody decodes the body of a message into v, a pointer, as Handle does. It is for middleware, and for
// processors with handlers of their own. A body over 16 MiB, packed or unpacked, is an error of class validation.
func (m *Mux) DecodeBody(msg *Message, v any) error {
	if m.decode == nil {
		return DecodeJSON(msg, v)
	}
	body, err := base.Unpacked(msg.ContentEncoding, msg.Body)
	if err != nil {
		return undecoded(v, err)
	}
	if base.IsPacked(msg.ContentEncoding) {
		unpacked := *msg
		unpacked.Body, unpacked.ContentEncoding = body, ""
		msg = &unpacked
	}
	if err := m.decode(msg, v); err != nil {
		return undecoded(v, err)
	}
	return nil
}

// DecodeJSON decodes the JSON body of a message into v, a pointer. The body is exactly one JSON value, not null, of at
// most 16 MiB packed and unpacked. It unpacks ContentEncoding gzip and skips a byte order mark. Members unknown to v
// are ignored, so that senders may add some. ContentType is empty, application/json or ends in +json. Errors are of
// class validation and do not quote the body.
func DecodeJSON(m *Message, v any) error {
	if err := base.Decode(m.ContentType, m.ContentEncoding, m.Body, v); err != nil {
		return undecoded(v, err)
	}
	return nil
}

// undecoded returns the error of a body that could not be decoded into v. The class of a marked error stays.
func undecoded(v any, err error) error {
	marked := base.Judge(err) != base.Verdict{}
	err = fmt.Errorf("inbox: decode %s: %w", strings.TrimPrefix(fmt.Sprintf("%T", v), "*"), err)
	if marked {
		return err
	}
	return Invalid(err)
}

// Use adds middleware around every message, outermost first and outside the middleware of single handlers. It
// also runs for messages without a handler; their result is an error of class validation.
func (m *Mux) Use(wrap ...Middleware) { m.steps = append(m.steps, wrap...) }

// SetLimit bounds how many messages of a name a consumer in this process runs at once, for a handler with a
// scarce resource. The other messages of the queue continue. 0 means that only ConsumerConfig.Concurrency
// bounds them. A negative limit is an error. A consumer's Run fails if the name has no handler and there is
// no Fallback.
func (m *Mux) SetLimit(name string, limit int) error {
	if limit < 0 {
		return fmt.Errorf("inbox: limit %d of %q is negative", limit, name)
	}
	m.limits[name] = limit
	return nil
}

// Limit implements driver.Limiter. It returns the limit set by SetLimit, or 0.
func (m *Mux) Limit(name string) int { return m.limits[name] }

// Configured implements driver.Configured. It returns an error for each limit of a name without a handler.
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

// Process implements Processor, one message after the other. A panic counts as an unmarked error. If a
// draining consumer cancelled the context of a handler, the handler's error is marked with ErrDraining.
func (m *Mux) Process(ctx context.Context, msgs []*Message) []error {
	results := make([]error, len(msgs))
	for i, msg := range msgs {
		m.run(ctx, m.call(msg), &results[i])
	}
	return results
}

func (m *Mux) run(ctx context.Context, c *Call, result *error) {
	*result = errExited
	defer func() { *result = c.End(*result) }() // also if the handler exits its goroutine
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

// Decode finds the handlers of messages and decodes the bodies. It runs neither middleware nor handlers.
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

// find sets the work of a call, and adds the middleware of its name.
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

// on returns the work of the handler for one message.
func (h Handler) on(m *Message) func(context.Context) error {
	return func(ctx context.Context) error { return h(ctx, m) }
}

// Call is one message with its middleware and its work, as Mux.Decode returns it. A processor calls Begin,
// does the work, and calls End. To process several messages together it may begin all of them first. A Call
// is for one delivery and one goroutine at a time.
type Call struct {
	// Message is the message passed to Decode.
	Message *Message
	// Work is the result of the decode function of Mux.Route. For other handlers it is a
	// func(context.Context) error that runs the handler. It is nil if Begin returns an error.
	Work any

	err   error        // why there is no work
	steps []Middleware // outermost first

	outer context.Context // the argument of Begin
	inner context.Context // outer with the values added by the steps
	ends  []func(err error) error
}

// Begin runs the middleware that precedes the work. It returns the context for the work. If it returns an
// error, do not do the work: pass the error to End as the message's result.
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

// End passes the result through the middleware that has started, innermost first, and returns the final
// result. If a draining consumer cancelled the context, an error is marked with ErrDraining. Without a Begin,
// End returns the result unchanged.
func (c *Call) End(result error) error {
	for i := len(c.ends) - 1; i >= 0; i-- {
		end := c.ends[i]
		c.ends = c.ends[:i] // each runs once, even if it exits the goroutine
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

// Middleware is a step around each message, called before the handler. The handler and the inner middleware
// get the context that it returns; nil leaves the context unchanged. An error is the message's result, and
// the inner middleware and the handler do not run. The returned function, if any, is called once with the
// message's result, even if that is the middleware's own error; its return value replaces the result.
//
// In a batch all messages begin, one after the other, before the first one ends. So middleware must not hold
// something until the end that the begin of another message needs, such as a mutex. A panic is an error. The
// message must not be changed.
type Middleware func(ctx context.Context, m *Message) (inner context.Context, end func(result error) error, err error)

// Blocking returns middleware that waits before each message. While it waits it occupies a worker and nothing
// else. It waits for at most half of the time left in the context; the other half is for the handler. If that
// time ends or the waiter fails, the message is postponed and keeps its attempts; see Postpone. A nil waiter
// means no wait.
func Blocking(w Waiter) Middleware {
	return func(ctx context.Context, _ *Message) (context.Context, func(error) error, error) {
		if w == nil {
			return nil, nil, nil
		}
		ctx, cancel := halfOf(ctx)
		defer cancel()
		if err := w.Wait(ctx); err != nil {
			return nil, nil, Postpone(fmt.Errorf("inbox: wait before processing: %w", err), 0)
		}
		return nil, nil, nil
	}
}

// halfOf bounds a context by half of its remaining time. A handler that started with the little time left by
// the wait would time out, and that would cost the message an attempt.
func halfOf(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, bounded := ctx.Deadline()
	if !bounded {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, time.Until(deadline)/2)
}

// Processor does the work of messages. *Mux does not deduplicate; the processors of inboxpgx and inboxredis
// do. Package inboxtest/conformance tests the contract.
type Processor interface {
	// Process returns one result per message, in the same order. Nil means that the message's effect is
	// durable, or that the message is a duplicate of a message with a durable effect: acknowledge it.
	// driver.Classify reads any other result. Process is safe for concurrent use. Messages that had not
	// started when ctx ended get an error that is ErrDraining.
	Process(ctx context.Context, msgs []*Message) []error
}

// Waiter blocks until the caller may continue, such as a rate limiter bound to a key. It returns an error if
// ctx ends first, or if the waiter cannot decide.
type Waiter interface {
	Wait(ctx context.Context) error
}
