// Package wakeups holds the running sweepers of one process, for a store to wake.
package wakeups

import (
	"sync"
	"time"
)

// List holds the wake functions of running sweepers. The zero value is empty. It is
// safe for concurrent use.
type List struct {
	mu    sync.Mutex
	wakes map[*func(time.Time)]struct{}
}

// Add makes Wake call a function until remove is called.
func (l *List) Add(wake func(at time.Time)) (remove func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.wakes == nil {
		l.wakes = map[*func(time.Time)]struct{}{}
	}
	key := &wake
	l.wakes[key] = struct{}{}
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.wakes, key)
	}
}

// Wake calls every function. None of them may block.
func (l *List) Wake(at time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for wake := range l.wakes {
		(*wake)(at)
	}
}
