package outboxpgx

import (
	"context"
	"slices"
	"sync"
)

// relays are those of this process that run on one Store.
type relays struct {
	mu   sync.Mutex
	list []*relay

	first chan struct{} // holds a value while one of them listens and prunes for all
}

type relay struct{ wake func() bool }

// join adds a relay until leave is called.
func (r *relays) join(wake func() bool) (leave func()) {
	joined := &relay{wake}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.list = append(slices.Clone(r.list), joined)
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.list = slices.DeleteFunc(slices.Clone(r.list), func(other *relay) bool { return other == joined })
	}
}

// wake asks the relays in turn until one will look. False: none will.
func (r *relays) wake() bool {
	r.mu.Lock()
	list := r.list // never changed in place
	r.mu.Unlock()
	return slices.ContainsFunc(list, func(relay *relay) bool { return relay.wake() })
}

// whileFirst waits until no other relay does the work, and then does it.
func (r *relays) whileFirst(ctx context.Context, work func(context.Context)) {
	select {
	case r.first <- struct{}{}:
		defer func() { <-r.first }()
		work(ctx)
	case <-ctx.Done():
	}
}
