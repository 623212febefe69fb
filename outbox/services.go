package outbox

import (
	"context"
	"errors"
	"sync"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

// runBackground has the store do its own work beside the relay until ctx ends. wait returns after
// the end of that work.
func (r *Relay) runBackground(ctx context.Context) (wait func()) {
	source, ok := r.source.(driver.Background)
	if !ok {
		return func() {}
	}
	var running sync.WaitGroup
	running.Go(func() { source.Background(ctx, func() bool { return ctx.Err() == nil && r.look() }) })
	return running.Wait
}

// look is the wake function of the store's Background: it makes the relay look for messages now, or
// reports that it does not.
func (r *Relay) look() bool {
	r.mu.Lock()
	_, paused := r.pauses[""]
	reached := r.lastLook == nil || errors.Is(r.lastLook, errNotStarted)
	r.mu.Unlock()
	if paused || !reached {
		return false
	}
	r.Wake()
	return true
}
