package expiry

import (
	"sync"
	"time"
)

// alarm wakes a sweeper that waits for a moment, by the store's clock, if there
// is something to do before it. It keeps what comes in while nobody waits.
type alarm struct {
	ring chan struct{}

	mu    sync.Mutex
	until time.Time // what is waited for; zero while nobody waits
	early bool      // something came in
	at    time.Time // the earliest time that did; zero if one was unknown
}

func newAlarm() *alarm { return &alarm{ring: make(chan struct{}, 1)} }

// set rings if at, or an unknown time if it is zero, comes before what is waited for.
func (a *alarm) set(at time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.early || at.Before(a.at) {
		a.early, a.at = true, at
	}
	if !a.until.IsZero() {
		a.settle()
	}
}

// arm begins to wait until then.
func (a *alarm) arm(until time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.until = until
	a.settle()
}

// settle rings for what came in, or forgets it because it has time.
func (a *alarm) settle() {
	if a.early && a.at.Before(a.until) {
		select {
		case a.ring <- struct{}{}:
		default:
		}
	}
	a.early = false
}

// disarm ends the wait. What rings unheard is forgotten: a look follows.
func (a *alarm) disarm() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.until = time.Time{}
	select {
	case <-a.ring:
	default:
	}
}

// clear forgets what came in: a look is about to see it.
func (a *alarm) clear() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.early = false
}
