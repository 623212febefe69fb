package outboxtest

import (
	"context"
	"slices"
	"sync"
)

// relays are those that run on one Store.
type relays struct {
	mu   sync.Mutex
	list []*relay
}

type relay struct{ wake func() bool }

// Background implements driver.Background: it wakes the relay when it begins, and for commits until ctx
// ends. There is nothing to listen to and nothing to prune.
func (s *Store) Background(ctx context.Context, wake func() bool) {
	joined := &relay{wake}
	s.relays.change(func(list []*relay) []*relay { return append(list, joined) })
	wake() // for what was committed since the relay's first look
	<-ctx.Done()
	s.relays.change(func(list []*relay) []*relay {
		return slices.DeleteFunc(list, func(other *relay) bool { return other == joined })
	})
}

func (r *relays) change(fn func([]*relay) []*relay) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.list = fn(slices.Clone(r.list))
}

// Hears implements driver.Hearing: no commit goes unheard.
func (s *Store) Hears() bool { return true }

// Wake tells a relay that runs on the Store that messages were committed. Write does so by itself.
func (s *Store) Wake() {
	s.relays.mu.Lock()
	list := s.relays.list // never changed in place
	s.relays.mu.Unlock()
	for _, r := range list {
		if r.wake() {
			return
		}
	}
}
