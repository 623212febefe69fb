package txretry

import (
	"context"
	"fmt"
	"slices"
	"sync"
)

// turns lets the callers of one key pass one at a time, first come first
// served, before any of them takes a connection. A hot row then costs a queue
// instead of a storm of serialization failures. It orders the callers of one
// process only; between processes the database still decides.
type turns struct {
	mu      sync.Mutex
	waiting map[string][]chan struct{} // present while somebody holds the key; a closed channel passes the key on
}

// take waits for the turn of a key. The caller must pass the key on. On error it has left the queue because its
// context has ended.
func (t *turns) take(ctx context.Context, key string) error {
	own, first := t.enter(key)
	if first {
		return nil
	}
	select {
	case <-own:
		return nil
	case <-ctx.Done():
		if t.leave(key, own) {
			return fmt.Errorf("txretry: waiting for the serial key: %w", ended(ctx))
		}
		return nil // the turn came at that very moment
	}
}

func (t *turns) enter(key string) (own chan struct{}, first bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	waiting, taken := t.waiting[key]
	if taken {
		own = make(chan struct{})
		t.waiting[key] = append(waiting, own)
		return own, false
	}
	if t.waiting == nil {
		t.waiting = make(map[string][]chan struct{})
	}
	t.waiting[key] = nil
	return nil, true
}

// leave removes a caller from the queue, and reports whether it was still there.
func (t *turns) leave(key string, own chan struct{}) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	i := slices.Index(t.waiting[key], own)
	if i >= 0 {
		t.waiting[key] = slices.Delete(t.waiting[key], i, i+1)
	}
	return i >= 0
}

// pass gives the key to the next in the queue, or frees it.
func (t *turns) pass(key string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	waiting := t.waiting[key]
	if len(waiting) == 0 {
		delete(t.waiting, key)
		return
	}
	t.waiting[key] = waiting[1:]
	close(waiting[0])
}
