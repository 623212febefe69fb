package txretry

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/holdfast-go/holdfast/txretry/driver"
)

// errTooLate is the error of an attempt that is not begun.
var errTooLate = fmt.Errorf("txretry: less time left than DeadlineMargin: %w", context.DeadlineExceeded)

// timeLeft returns how long an attempt may wait for a lock; bounded is false if
// the deadline does not matter.
func (c *call) timeLeft(ctx context.Context) (left time.Duration, bounded bool) {
	if c.opts.DeadlineMargin == 0 {
		return 0, false
	}
	deadline, ok := ctx.Deadline()
	if !ok {
		return 0, false
	}
	return time.Until(deadline) - c.opts.DeadlineMargin, true
}

// tooLate refuses an attempt that cannot end before the deadline, before it
// waits for a connection. A context that has ended tells so itself.
func (c *call) tooLate(ctx context.Context) error {
	if left, bounded := c.timeLeft(ctx); !bounded || left >= time.Millisecond || ctx.Err() != nil {
		return nil
	}
	if len(c.failed) > 0 {
		return c.giveUp(context.DeadlineExceeded)
	}
	return errTooLate
}

// spec returns the begin message, its lock_timeout lowered to the time left.
func (c *call) spec(ctx context.Context) (*driver.Spec, error) {
	key := c.opts.beginKey()
	left, bounded := c.timeLeft(ctx)
	if !bounded || left >= key.lockTimeout {
		return c.m.begin.spec(key), nil
	}
	if left < time.Millisecond {
		return nil, errTooLate
	}
	key.lockTimeout = left.Truncate(time.Millisecond)
	spec := key.spec()
	spec.Once = true // not worth remembering, here and on the server
	return spec, nil
}

// sleep returns ctx's error if it ends first.
func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// ended is the end of ctx as an error under which both ctx.Err() and the cause
// are found.
func ended(ctx context.Context) error { return withCause(ctx, ctx.Err()) }

// withCause joins the cause of ctx's end, if it has ended, to what came of it.
func withCause(ctx context.Context, err error) error {
	cause := context.Cause(ctx)
	switch {
	case cause == nil || errors.Is(err, cause):
		return err
	case errors.Is(cause, err):
		return cause
	}
	return fmt.Errorf("%w: %w", err, cause)
}
