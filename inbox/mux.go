package inbox

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"

	"github.com/holdfast-go/holdfast/inbox/internal/base"
)

// Handler does the work of one message.
type Handler func(ctx context.Context, m *Message) error

// Middleware wraps a handler.
type Middleware = func(Handler) Handler

// Mux is a Processor that gives each message to the handler of its name. It does not
// deduplicate. Make it with NewMux and register everything first; then it may be used from
// many goroutines.
type Mux struct {
	handlers map[string]Handler
	fallback Handler // nil: a message of no handler's name is refused
	wrappers []Middleware
	entry    Handler // the wrappers around dispatch
}

// NewMux returns a Mux without handlers.
func NewMux() *Mux {
	m := &Mux{handlers: map[string]Handler{}}
	m.entry = m.dispatch
	return m
}

// Handle registers fn for the messages of a name, their JSON bodies decoded into T: exactly one
// JSON value, not null, of at most 16 MiB; members that T does not know are passed over. Anything
// else makes the message a dead letter of class validation. The same type may be registered under
// several names. The middleware wraps this handler only, the first one outermost. It returns the
// errors of Register.
func Handle[T any](m *Mux, name string, fn func(ctx context.Context, v T) error, wrap ...Middleware) error {
	if fn == nil {
		return fmt.Errorf("inbox: handler of %q is nil", name)
	}
	return m.Register(name, func(ctx context.Context, msg *Message) error {
		var v T
		if err := base.Decode(msg.ContentType, msg.Body, &v); err != nil {
			return Invalid(fmt.Errorf("inbox: decode %T: %w", v, err))
		}
		return fn(ctx, v)
	}, wrap...)
}

// Register is Handle for a handler that reads the message itself. It is an error when the
// name is none that a message may have (see Message.Validate), has a handler already, or h is nil.
func (m *Mux) Register(name string, h Handler, wrap ...Middleware) error {
	switch {
	case name == "" || len(name) > base.MaxNameBytes || !base.IsText(name):
		return fmt.Errorf("inbox: handler name %q must have 1 to %d bytes of text", name, base.MaxNameBytes)
	case h == nil:
		return fmt.Errorf("inbox: handler of %q is nil", name)
	case m.handlers[name] != nil:
		return fmt.Errorf("inbox: %q has a handler already", name)
	}
	m.handlers[name] = wrapped(h, wrap)
	return nil
}

// Fallback registers a handler for the messages that have no handler of their name, in place
// of refusing them as class validation: one that returns nil passes them over, one that
// returns Postpone leaves them to another consumer. Nil refuses again.
func (m *Mux) Fallback(h Handler) { m.fallback = h }

// Use adds middleware around every message, the first one outermost. It also sees the
// messages that no handler gets, as errors of class validation.
func (m *Mux) Use(wrap ...Middleware) {
	m.wrappers = append(m.wrappers, wrap...)
	m.entry = wrapped(m.dispatch, m.wrappers)
}

func wrapped(h Handler, wrap []Middleware) Handler {
	for i := len(wrap) - 1; i >= 0; i-- {
		h = wrap[i](h)
	}
	return h
}

// Process implements Processor, one message after the other. A panic counts as
// an unmarked error. Results of handlers whose context a draining consumer has cancelled are
// marked with ErrDraining.
func (m *Mux) Process(ctx context.Context, msgs []*Message) []error {
	results := make([]error, len(msgs))
	for i, msg := range msgs {
		results[i] = m.one(ctx, msg)
	}
	return results
}

func (m *Mux) one(ctx context.Context, msg *Message) error {
	if ctx.Err() != nil {
		return fmt.Errorf("%w: not started: %w", ErrDraining, context.Cause(ctx))
	}
	err := m.safely(base.NewContext(ctx, msg), msg)
	if err != nil && errors.Is(context.Cause(ctx), ErrDraining) {
		return fmt.Errorf("%w: %w", ErrDraining, err)
	}
	return err
}

func (m *Mux) safely(ctx context.Context, msg *Message) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &base.Panic{Value: v, Stack: debug.Stack()}
		}
	}()
	return m.entry(ctx, msg)
}

func (m *Mux) dispatch(ctx context.Context, msg *Message) error {
	if err := msg.Validate(); err != nil {
		return err
	}
	if h, ok := m.handlers[msg.Name]; ok {
		return h(ctx, msg)
	}
	if m.fallback != nil {
		return m.fallback(ctx, msg)
	}
	return Invalid(fmt.Errorf("inbox: no handler for %q", msg.Name))
}

// Blocking is middleware that waits before each message, holding nothing but the worker.
// When the waiter fails, which is no failure of the message, the message is postponed and
// keeps its attempts; see Postpone. A nil waiter means no wait.
func Blocking(w Waiter) Middleware {
	return func(next Handler) Handler {
		if w == nil {
			return next
		}
		return func(ctx context.Context, m *Message) error {
			if err := w.Wait(ctx); err != nil {
				return Postpone(fmt.Errorf("inbox: wait for leave to start: %w", err), 0)
			}
			return next(ctx, m)
		}
	}
}
