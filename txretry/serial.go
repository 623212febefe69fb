package txretry

import (
	"context"
	"slices"
	"sync"
)

// turns lets the callers of one key pass one at a time, first come first
// served, before any of them takes a connection. A hot row then costs a queue
// instead of a storm of serialization failures. It orders the callers of one
// process only; between processes the database still decides.
type turns struct {
	mu     sync.Mutex
	queues map[string][]chan struct{} // present while somebody holds the key
}

// enter waits for the caller's turn; leave passes it on and must be called.
// The error is that of ctx, and leave is then nil.
func (t *turns) enter(ctx context.Context, key string) (leave func(), err error) {
	t.mu.Lock()
	waiting, taken := t.queues[key]
	if !taken {
		if t.queues == nil {
			t.queues = make(map[string][]chan struct{})
		}
		t.queues[key] = nil
		t.mu.Unlock()
		return func() { t.pass(key) }, nil
	}
	turn := make(chan struct{})
	t.queues[key] = append(waiting, turn)
	t.mu.Unlock()

	select {
	case <-turn:
		return func() { t.pass(key) }, nil
	case <-ctx.Done():
		t.abandon(key, turn)
		return nil, ended(ctx)
	}
}

// pass gives the key to the next in line, or frees it.
func (t *turns) pass(key string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	waiting := t.queues[key]
	if len(waiting) == 0 {
		delete(t.queues, key)
		return
	}
	close(waiting[0])
	t.queues[key] = waiting[1:]
}

// abandon takes a caller out of line. Its turn may have come at that very
// moment: then it is passed on.
func (t *turns) abandon(key string, turn chan struct{}) {
	t.mu.Lock()
	waiting := t.queues[key]
	if i := slices.Index(waiting, turn); i >= 0 {
		t.queues[key] = slices.Delete(waiting, i, i+1)
		t.mu.Unlock()
		return
	}
	t.mu.Unlock()
	t.pass(key)
}
