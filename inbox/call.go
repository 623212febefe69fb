package inbox

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"

	"github.com/holdfast-go/holdfast/inbox/internal/base"
)

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
		if err := safely(func() error { return c.enter(step) }); err != nil {
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
		if err := safely(func() error { result = end(given); return nil }); err != nil {
			result = err
		}
	}
	if result != nil && c.outer != nil && errors.Is(context.Cause(c.outer), ErrDraining) && !errors.Is(result, ErrDraining) {
		return fmt.Errorf("%w: %w", ErrDraining, result)
	}
	return result
}

// safely returns the panic of fn as an error.
func safely(fn func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &base.Panic{Value: v, Stack: debug.Stack()}
		}
	}()
	return fn()
}
