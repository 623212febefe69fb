package txretry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/txretry/driver"
)

// errNoReturn is the error in the span of a call whose fn panicked or exited its
// goroutine, so that Do does not return.
var errNoReturn = errors.New("txretry: fn did not return")

// call is one call of Do.
type call struct {
	m    *Manager
	opts Options
	fn   func(ctx context.Context, tx pgx.Tx) error

	attempts int       // begun so far
	failed   []Attempt // those that another one may follow
	outcome  driver.Outcome
	last     *transaction // the last one that fn has seen
	first    transaction  // of the first attempt

	phases phases
	mark   time.Time // since when the present phase lasts
}

// lap ends a phase.
func (c *call) lap(phase *time.Duration) {
	now := time.Now()
	*phase += now.Sub(c.mark)
	c.mark = now
}

// run makes attempts until one succeeds, fails for good, or none is left.
func (c *call) run(ctx context.Context) error {
	for {
		c.attempts++
		start := time.Now()
		res := c.traced(ctx, c.attempt)
		if res.lost != nil {
			res = c.resolve(ctx, res, start)
		}
		switch {
		case res.err == nil:
			return nil
		case !res.again:
			return c.final(ctx, res)
		}
		c.failed = append(c.failed, Attempt{res.sqlstate, res.phase, time.Since(start), res.err})
		if err := c.pause(ctx); err != nil {
			return err
		}
	}
}

// traced makes an attempt under a span of its own.
func (c *call) traced(ctx context.Context, attempt func(ctx context.Context) result) (res result) {
	ctx, span := c.m.telemetry.startAttempt(ctx, c.attempts)
	returned := false
	defer func() { endAttempt(span, returned, &res) }()
	res = attempt(ctx)
	returned = true
	return res
}

// final is the error of an attempt that is not followed by another one.
func (c *call) final(ctx context.Context, res result) error {
	before := res.phase == phaseAcquire || res.phase == phaseBegin
	switch {
	case before && len(c.failed) == 0 && ctx.Err() != nil:
		return withCause(ctx, res.err)
	case before && len(c.failed) > 0 && ctx.Err() != nil:
		return c.interrupted(ctx)
	}
	return c.explain(res)
}

// pause waits before the next attempt, unless there is to be none.
func (c *call) pause(ctx context.Context) error {
	defer c.lap(&c.phases.sleep)
	n := len(c.failed)
	if n >= c.opts.MaxAttempts {
		return c.giveUp(nil)
	}
	if ctx.Err() != nil {
		return c.interrupted(ctx)
	}
	policy := &c.m.policy
	if c.opts.SerialKey != "" {
		policy = &c.m.policyInTurn
	}
	delay := policy.Delay(n, c.m.cfg.Rand())
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) <= delay {
		return c.giveUp(context.DeadlineExceeded)
	}
	c.announce(ctx, delay)
	if sleep(ctx, delay) != nil {
		return c.interrupted(ctx)
	}
	return nil
}

func (c *call) announce(ctx context.Context, delay time.Duration) {
	n := len(c.failed)
	last := c.failed[n-1]
	c.m.cfg.Logger.DebugContext(ctx, "txretry: retrying transaction",
		slog.String("name", c.opts.Name), slog.Int("attempt", n), slog.String("phase", last.Phase),
		slog.String("sqlstate", last.SQLSTATE), slog.Duration("delay", delay))
}

// giveUp is the error when no attempt is left, or cause forbids the next one.
// Only lock failures are called LOCK_TIMEOUT.
func (c *call) giveUp(cause error) error {
	last := c.failed[len(c.failed)-1]
	if isLockFailure(last.SQLSTATE) {
		return &LockTimeoutError{Name: c.opts.Name, Attempts: c.failed, cause: cause, retryAfter: c.m.retryAfter()}
	}
	res := result{err: last.Err, phase: last.Phase, outOfOrder: last.SQLSTATE == ""}
	if cause != nil {
		res.err = fmt.Errorf("txretry: %sgiven up after %d attempts: %w: %w", prefix(c.opts.Name), len(c.failed), cause, last.Err)
	}
	return c.explain(res)
}

// interrupted joins the end of the context with the failure that had made it
// wait, so that neither hides the other.
func (c *call) interrupted(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return c.giveUp(ended(ctx))
	}
	last := c.failed[len(c.failed)-1].Err
	return fmt.Errorf("txretry: %sinterrupted after %d attempts: %w: %w", prefix(c.opts.Name), len(c.failed), ended(ctx), last)
}
