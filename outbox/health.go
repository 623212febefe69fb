package outbox

import (
	"errors"
	"sync"
)

var (
	errNotStarted = errors.New("outbox: the relay has not looked at its store yet")
	errEnded      = errors.New("outbox: the relay has ended")
)

// health is what is known of a relay's store. Its methods may be called from any goroutine.
type health struct {
	mu      sync.Mutex
	last    error // of the last Claim or Settle
	looking bool  // Run works and the store is not paused
}

// saw notes how the store answered.
func (h *health) saw(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.last = err
}

// err is why the last look did not reach the store.
func (h *health) err() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.last
}

// setLooking says whether the relay looks for messages when it is woken.
func (h *health) setLooking(looking bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.looking = looking
}

// whileLooking calls wake if the relay looks then, and reports whether it does.
func (h *health) whileLooking(wake func()) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.looking {
		wake()
	}
	return h.looking
}
