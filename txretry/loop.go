package txretry

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/txretry/internal/session"
)

// errNoReturn stands in observations for an fn that panicked or exited its
// goroutine: there is nobody for Do to return it to.
var errNoReturn = errors.New("txretry: fn did not return")

// call is one call of Do.
type call struct {
	m    *Manager
	opts Options
	spec session.Spec
	fn   func(ctx context.Context, tx pgx.Tx) error

	attempts int       // begun so far
	failed   []Attempt // those with a transient failure
	outcome  Outcome
}

// run makes attempts until one succeeds, fails for good, or none is left. It
// returns the functions to run after the commit.
func (c *call) run(ctx context.Context) ([]func(), error) {
	for {
		c.attempts++
		start := time.Now()
		res := c.attempt(ctx)
		if res.err == nil {
			return res.hooks, nil
		}
		if res.sqlstate == "" {
			return nil, c.final(ctx, res)
		}
		c.failed = append(c.failed, Attempt{res.sqlstate, res.phase, time.Since(start), res.err})
		if err := c.pause(ctx); err != nil {
			return nil, err
		}
	}
}

// final is the error of an attempt that is not followed by another one.
func (c *call) final(ctx context.Context, res result) error {
	waiting := res.phase == PhaseAcquire || res.phase == PhaseBegin
	if waiting && len(c.failed) > 0 && ctx.Err() != nil {
		return c.interrupted(ctx)
	}
	return res.err
}

// pause waits before the next attempt, unless there is to be none.
func (c *call) pause(ctx context.Context) error {
	n := len(c.failed)
	if n >= c.opts.MaxAttempts {
		return c.exhausted(nil)
	}
	delay := c.m.policy.Delay(n, c.m.cfg.Rand())
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) <= delay {
		return c.exhausted(context.DeadlineExceeded)
	}
	if ctx.Err() != nil {
		return c.interrupted(ctx)
	}
	c.announce(ctx, delay)

	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return c.interrupted(ctx)
	}
}

func (c *call) announce(ctx context.Context, delay time.Duration) {
	n := len(c.failed)
	last := c.failed[n-1]
	c.m.cfg.Logger.DebugContext(ctx, "txretry: retrying transaction",
		"name", c.opts.Name, "attempt", n, "phase", last.Phase, "sqlstate", last.SQLSTATE, "delay", delay)
	if c.m.cfg.Hooks.OnRetry != nil {
		c.m.cfg.Hooks.OnRetry(ctx, Retry{Name: c.opts.Name, Number: n, Attempt: last, Delay: delay})
	}
}

func (c *call) exhausted(cause error) error {
	wait := (c.m.policy.Max + time.Second - 1).Truncate(time.Second)
	return &LockTimeoutError{Name: c.opts.Name, Attempts: c.failed, cause: cause, retryAfter: wait}
}

// interrupted joins the end of the context with the failure that had made it
// wait, so that neither hides the other.
func (c *call) interrupted(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return c.exhausted(ended(ctx))
	}
	last := c.failed[len(c.failed)-1].Err
	return fmt.Errorf("txretry: %sinterrupted after %d attempts: %w: %w", prefix(c.opts.Name), len(c.failed), ended(ctx), last)
}

// ended is the end of ctx as an error under which both ctx.Err() and the cause
// are found.
func ended(ctx context.Context) error {
	err, cause := ctx.Err(), context.Cause(ctx)
	if errors.Is(cause, err) {
		return cause
	}
	return fmt.Errorf("%w: %w", err, cause)
}
