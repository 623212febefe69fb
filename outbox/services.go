package outbox

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

// runPublishers keeps the publishers' connections until stop is called, which waits for their end.
// They end by themselves when no confirm is waited for any more.
func (r *Relay) runPublishers(life spans) (stop func()) {
	ctx, cancel := context.WithCancel(life.confirm)
	var running sync.WaitGroup
	for _, t := range r.transports {
		running.Go(func() { t.run(ctx) })
	}
	return func() {
		cancel()
		r.await(life.work, &running, "publishers")
	}
}

// runBackground has the store do its own work beside the relay until ctx ends. wait returns after
// the end of that work.
func (r *Relay) runBackground(life spans) (wait func()) {
	source, ok := r.source.(driver.Background)
	if !ok {
		return func() {}
	}
	var running sync.WaitGroup
	running.Go(func() { source.Background(life.life, r.look) })
	return func() { r.await(life.work, &running, "store") }
}

// await waits for what is running and was told to end, until the end of work and for ShutdownTimeout
// at most: a server that does not answer holds up no shutdown.
func (r *Relay) await(work context.Context, running *sync.WaitGroup, what string) {
	ctx, cancel := context.WithTimeout(work, r.cfg.ShutdownTimeout)
	defer cancel()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		running.Wait()
	}()
	select {
	case <-ended:
	case <-ctx.Done():
		r.log(ctx, slog.LevelWarn, "outbox: ShutdownTimeout is over, what does not end is left behind", what, slog.String("what", what))
	}
}

// look is the wake function of the store's Background: it makes the relay look for messages now, or
// reports that it does not.
func (r *Relay) look() bool {
	return !r.transports[""].breaker.leftAlone() && r.health.whileLooking(r.wake.ring)
}

// prune has the store delete what is due, for a while at most: what is left is for the next Drain,
// which ends with it, for systems without a running relay.
func prune(ctx context.Context, source driver.Source, atMost time.Duration) {
	pruner, ok := source.(driver.Pruner)
	if !ok || ctx.Err() != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, atMost)
	defer cancel()
	pruner.PrunePass(ctx)
}

// Check looks at the servers of the store and of every publisher. nil: there is nothing to mend.
// Else the error joins the findings, each with a method Mend() string, and the failures to look.
func (r *Relay) Check(ctx context.Context) error {
	parts := []any{r.source}
	for _, t := range r.transports {
		parts = append(parts, t.publisher)
	}
	var errs []error
	for _, part := range parts {
		if part, ok := part.(driver.Checked); ok {
			errs = append(errs, single(part.Check(ctx))...)
		}
	}
	return errors.Join(errs...)
}

// single returns the errors that err joins, so that they can be joined with others.
func single(err error) []error {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		return joined.Unwrap()
	}
	return []error{err}
}
