package inboxamqp

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast/inbox/driver"
)

// maxHeld bounds how many messages are kept from being the next probe. None is held for long
// enough to reach the broker's timeout.
const maxHeld = 256

// held is a message that could not be processed, for want of a server as it seems.
type held struct {
	d      *delivery
	f      driver.Failure
	failed uint64 // on the workers' clock
	since  time.Time
	struck bool // it has failed like this before, while others went through
}

// trial keeps those until another message tells whose failure it was.
type trial struct {
	some atomic.Bool // whether any is held: what goes well pays nothing

	mu    sync.Mutex
	epoch int64 // whose failures it takes; 0: none
	held  []held
}

// open begins to take the failures of an epoch.
func (t *trial) open(epoch int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.epoch = epoch
}

// take keeps a message and returns how many are held that may show an outage. It gives the message
// back when no pause will follow, and the oldest when there are too many.
func (t *trial) take(h held) (fresh int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h.d.epoch != t.epoch {
		h.d.giveBack()
		return 0
	}
	t.held = append(t.held, h)
	t.some.Store(true)
	if len(t.held) > maxHeld {
		t.held[0].d.giveBack()
		t.held = t.held[1:]
	}
	for _, h := range t.held {
		if !h.struck {
			fresh++
		}
	}
	return fresh
}

// before removes and returns those that failed before a moment on the workers' clock.
func (t *trial) before(moment uint64) (all []held) {
	if !t.some.Load() {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	n := 0
	for n < len(t.held) && t.held[n].failed < moment {
		n++
	}
	all, t.held = t.held[:n:n], t.held[n:]
	t.some.Store(len(t.held) > 0)
	return all
}

// waited returns for how long the oldest is held that may show an outage, 0 when none is.
func (t *trial) waited() time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, h := range t.held {
		if !h.struck {
			return time.Since(h.since)
		}
	}
	return 0
}

// struck removes and returns those that have failed before.
func (t *trial) struck() (all []held) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.held = slices.DeleteFunc(t.held, func(h held) bool {
		if h.struck {
			all = append(all, h)
		}
		return h.struck
	})
	t.some.Store(len(t.held) > 0)
	return all
}

// release gives back what was kept, blaming none, and reports whether that was anything.
func (t *trial) release() bool {
	all := t.before(^uint64(0))
	for _, h := range all {
		h.d.giveBack()
	}
	return len(all) > 0
}

// close takes nothing from now on.
func (t *trial) close() {
	t.open(0)
	t.release()
}
