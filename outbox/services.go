package outbox

import (
	"context"
	"errors"
	"log/slog"
	"sync"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

// watchPublishers ends the pause of a transport when its publisher is ready again, until stop is
// called.
func (r *Relay) watchPublishers() (stop func()) {
	var stops []func()
	for _, t := range r.transports {
		if p, ok := t.publisher.(driver.Reconnecting); ok {
			stops = append(stops, p.OnReady(func() {
				t.reconnected()
				r.signal()
			}))
		}
	}
	return func() {
		for _, stop := range stops {
			stop()
		}
	}
}

// runPublishers keeps the publishers' connections until stop is called, which waits for their end.
// They end by themselves when no confirm is waited for any more.
func (r *Relay) runPublishers(life spans) (stop func()) {
	ctx, cancel := context.WithCancel(life.confirm)
	var running sync.WaitGroup
	for name, t := range r.transports {
		service, ok := t.publisher.(driver.Service)
		if !ok {
			continue
		}
		running.Go(func() {
			if err := service.Run(ctx); err != nil || ctx.Err() == nil {
				r.log(ctx, slog.LevelError, "outbox: a publisher ended before its relay", name,
					slog.String("transport", name), slog.Any("error", err))
			}
		})
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
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.looking || r.transports[""].leftAlone() {
		return false
	}
	r.signal()
	return true
}

// setLooking says whether the relay looks for messages when it is woken.
func (r *Relay) setLooking(looking bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.looking = looking
}

// prune has the store delete what is due, for ShutdownTimeout at most: what is left is for the next
// Drain. Drain ends with it, for systems without a running relay.
func (r *Relay) prune(ctx context.Context) {
	source, ok := r.source.(driver.Pruner)
	if !ok || ctx.Err() != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, r.cfg.ShutdownTimeout)
	defer cancel()
	source.PrunePass(ctx)
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
