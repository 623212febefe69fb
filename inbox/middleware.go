package inbox

import (
	"context"
	"fmt"
	"time"
)

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
