package inboxredis

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"
)

const (
	// renewEvery is how often the server is told what is in work.
	renewEvery = 2 * time.Second
	// claimIdle is after how long without that an entry is anybody's, and a lease over.
	claimIdle = 8 * time.Second
	// dueEvery bounds how long a retry waits beyond its time.
	dueEvery = time.Second
	// dueAtOnce is how many retries one script takes to their stream.
	dueAtOnce   = 20
	trimEvery   = 10 * time.Second
	forgetEvery = 5 * time.Minute
	forgetAfter = time.Hour
)

// chores are what a group needs besides its sessions. Each process does them.
type chores struct {
	group *group
	renew func(context.Context) error
	soon  chan struct{} // a retry may be due before the next look
}

func (c *chores) run(ctx context.Context) {
	var all sync.WaitGroup
	defer all.Wait()
	all.Go(func() { c.every(ctx, renewEvery, "tell Redis what is in work", c.renew) })
	all.Go(func() { c.promote(ctx) })
	all.Go(func() { c.every(ctx, forgetEvery, "remove names of consumers that are gone", c.forget) })
	all.Go(func() { c.every(ctx, trimEvery, "trim the stream", c.trim) })
}

// every has work done at intervals.
func (c *chores) every(ctx context.Context, interval time.Duration, what string, work func(context.Context) error) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	failing := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			failing = c.report(ctx, failing, what, work(ctx))
		}
	}
}

// report logs a failure that is new, and returns whether there is one.
func (c *chores) report(ctx context.Context, failing bool, what string, err error) bool {
	if err != nil && ctx.Err() == nil && !failing {
		c.group.log.WarnContext(ctx, "inbox: not able to "+what, slog.Any("error", err))
	}
	return err != nil
}

// trim removes what all groups have processed.
func (c *chores) trim(ctx context.Context) error {
	err := c.trimOne(ctx, c.group.keys.retries())
	if c.group.cfg.KeepProcessed {
		return err
	}
	return errors.Join(err, c.trimOne(ctx, c.group.keys.stream))
}

// trimOne calls the script until nothing is left to remove: by one call for each look a busy stream
// would grow without end.
func (c *chores) trimOne(ctx context.Context, key string) error {
	for ctx.Err() == nil {
		if removed, err := c.group.script(ctx, trimScript, []string{key}); err != nil || removed == 0 {
			return err
		}
	}
	return nil
}

// forget removes the names of consumers that died.
func (c *chores) forget(ctx context.Context) error {
	return c.forgetIdle(ctx, forgetAfter)
}

func (c *chores) forgetIdle(ctx context.Context, idle time.Duration) error {
	var errs []error
	for _, key := range c.group.keys.read()[:2] {
		_, err := c.group.script(ctx, forgetScript, []string{key}, c.group.cfg.Group, idle.Milliseconds())
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// promote takes retries that are due to their stream.
func (c *chores) promote(ctx context.Context) {
	failing := false
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.soon:
		case <-timer.C:
		}
		next, err := c.due(ctx)
		failing = c.report(ctx, failing, "deliver retries that are due", err)
		timer.Reset(next)
	}
}

// due takes retries to their stream, and returns when to look again.
func (c *chores) due(ctx context.Context) (time.Duration, error) {
	next := dueEvery
	for _, putOff := range []bool{false, true} {
		keys := []string{c.group.keys.waiting(putOff), c.group.keys.retries()}
		millis, err := c.group.script(ctx, dueScript, keys, dueAtOnce)
		if err != nil {
			return dueEvery, err
		}
		if millis >= 0 {
			next = min(next, time.Duration(millis)*time.Millisecond)
		}
	}
	return next, nil
}

// look has promote look at once.
func (c *chores) look() {
	select {
	case c.soon <- struct{}{}:
	default: // it will
	}
}
