package txretry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/txretry/driver"
)

// maxBegins is how often an attempt sends BEGIN at most.
const maxBegins = 3

// open begins a transaction, or returns a nil session and why there is none. BEGIN has no effect, so if
// the connection is found lost it is sent again on another one, with twice the time. That is no attempt.
//
// With AtBegin the server holds the answer to BEGIN back until that statement is done. From the second
// time on it has as long as any statement, else one that waits for a lock would never get through.
func (c *call) open(ctx context.Context) (driver.Session, pgconn.CommandTag, result) {
	limits, start := c.limits(), time.Now()
	for n := 1; ; n++ {
		s, tag, failed := c.begin(ctx, limits)
		limits.Acquire = c.m.bounds.acquire - time.Since(start)
		if s != nil || n == maxBegins || limits.Acquire <= 0 || !errors.Is(failed.err, driver.ErrNotBegun) {
			return s, tag, failed
		}
		limits.Begin *= 2
		if limits.First = limits.Statement; limits.First > 0 {
			limits.First = max(limits.First, limits.Begin)
		}
		c.logLost(ctx, failed.err)
	}
}

func (c *call) logLost(ctx context.Context, err error) {
	if skipped, ok := c.m.lostBegin.Due(); ok {
		c.m.cfg.Logger.WarnContext(ctx, "txretry: connection lost before BEGIN was answered, taking another one",
			slog.String("name", c.opts.Name), slog.Any("error", err), slog.Int("skipped", skipped))
	}
}

func (c *call) limits() driver.Limits {
	begin := c.m.bounds.begin
	return driver.Limits{Acquire: c.m.bounds.acquire, Begin: begin, First: begin, Statement: c.opts.patience()}
}

// begin sends BEGIN once. If it fails, or panics, no connection is held afterwards.
func (c *call) begin(ctx context.Context, limits driver.Limits) (begun driver.Session, tag pgconn.CommandTag, failed result) {
	s, err := c.m.source.Acquire(ctx, limits)
	c.lap(&c.phases.acquire)
	if err != nil {
		err = fmt.Errorf("txretry: acquire a connection: %w", err)
		return nil, tag, result{err: err, phase: phaseAcquire, outOfOrder: ctx.Err() == nil}
	}
	defer func() {
		if begun == nil {
			c.end(ctx, s, false)
		}
	}()
	tag, err = s.Begin(ctx, c.spec(), c.opts.first())
	c.lap(&c.phases.begin)
	if err != nil {
		failed = c.failedIn(phaseBegin, fmt.Errorf("txretry: begin: %w", onStandby(s, err)))
		failed.outOfOrder = s.State() == driver.Lost && ctx.Err() == nil
		return nil, tag, failed
	}
	return s, tag, result{}
}
