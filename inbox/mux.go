package inbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

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
	*result = safely(func() error { return work(inner) })
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
	c.err = safely(func() error { return m.find(c) })
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
