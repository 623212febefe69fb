package txretry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/backoff"
	"github.com/holdfast-go/holdfast/txretry/driver"
)

// resolve finds out what became of a COMMIT that was not answered, if the call knows whom to ask, and
// replaces its result: committed is success, rolled back is retried like a transient failure. The attempt
// began not before begun.
func (c *call) resolve(ctx context.Context, unknown result, begun time.Time) result {
	if c.opts.Witness == nil && unknown.xid == "" {
		return unknown
	}
	defer c.lap(&c.phases.resolve)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.m.bounds.resolve)
	defer cancel()
	outcome, err := c.poll(ctx, unknown.xid, begun)
	if skipped, ok := c.m.lostReply.Due(); ok {
		c.m.cfg.Logger.WarnContext(ctx, "txretry: COMMIT was not answered", slog.String("name", c.opts.Name),
			slog.Any("found", outcome), slog.Any("error", err), slog.Int("skipped", skipped))
	}
	switch outcome {
	case driver.Committed:
		c.outcome = driver.Committed
		return result{}
	case driver.RolledBack:
		c.outcome = driver.RolledBack
		return result{err: fmt.Errorf("txretry: COMMIT not answered, found rolled back: %w", unknown.lost), phase: phaseCommit, again: true}
	}
	// What stopped the asking is not what happened to the call: only its text.
	unknown.err = &CommitUnknownError{Name: c.opts.Name, Err: fmt.Errorf("%w (not resolved: %v)", unknown.lost, err)}
	return unknown
}

var errStillOpen = errors.New("not known to have ended in time")

// poll asks until there is a definite answer, none is to be had, or ctx ends.
// Unknown comes with an error.
func (c *call) poll(ctx context.Context, xid string, begun time.Time) (driver.Outcome, error) {
	pauses := backoff.Policy{Base: 5 * time.Millisecond, Max: 250 * time.Millisecond, Jitter: 0.5}
	for n := 0; ; n++ {
		outcome, err := c.ask(ctx, xid, begun)
		if err == nil && outcome != driver.Unknown {
			return outcome, nil
		}
		if errors.Is(err, driver.ErrForgotten) {
			return driver.Unknown, err
		}
		if sleep(ctx, pauses.Delay(n, c.m.cfg.Rand())) != nil {
			if err == nil {
				err = errStillOpen
			}
			return driver.Unknown, err
		}
	}
}

func (c *call) ask(ctx context.Context, xid string, begun time.Time) (driver.Outcome, error) {
	if c.opts.Witness != nil {
		return c.askWitness(ctx)
	}
	return c.m.source.Fate(ctx, c.limits(), xid, begun)
}

// askWitness runs Options.Witness in a transaction that is rolled back.
func (c *call) askWitness(ctx context.Context) (driver.Outcome, error) {
	s, err := c.m.source.Acquire(ctx, c.limits())
	if err != nil {
		return driver.Unknown, err
	}
	t := new(transaction)
	t.open(ctx, c.m, s, pgx.ReadCommitted, false)
	defer c.release(ctx, t)
	spec := *c.m.begin.spec(beginKey{isolation: pgx.ReadCommitted, lockTimeout: c.opts.LockTimeout, idleTimeout: c.opts.IdleTimeout})
	spec.Aside = true
	if _, err := s.Begin(ctx, &spec, nil); err != nil {
		return driver.Unknown, err
	}
	committed, err := c.opts.Witness(&t.ctx, &t.root)
	t.close()
	switch {
	case err != nil:
		return driver.Unknown, err
	case committed:
		return driver.Committed, nil
	}
	return driver.RolledBack, nil
}
