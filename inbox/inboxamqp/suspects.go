package inboxamqp

import (
	"math/rand/v2"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
)

const (
	// maxHeld bounds how many messages a pause keeps from being the next probe. With the
	// longest distance of probes none is held for long enough to reach the broker's timeout.
	maxHeld = 16

	// suspectPause is how long a suspect stays away while others go through, spread by half.
	suspectPause = 2 * time.Second
)

// held is a message that could not be processed, for want of a server as it seems.
type held struct {
	d *delivery
	f inbox.Failure
}

// trial keeps those until a probe tells whose failure it was.
type trial struct {
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

// take keeps a message, or gives it back when no pause will follow. The oldest goes when
// there are too many.
func (t *trial) take(h held) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h.d.epoch != t.epoch {
		h.d.giveBack()
		return
	}
	t.held = append(t.held, h)
	if len(t.held) > maxHeld {
		t.held[0].d.giveBack()
		t.held = t.held[1:]
	}
}

// empty returns what was kept.
func (t *trial) empty() []held {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := t.held
	t.held = nil
	return all
}

func (t *trial) waiting() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.held) > 0
}

// release gives back what was kept, blaming none, and reports whether that was anything.
func (t *trial) release() bool {
	all := t.empty()
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

// unavailable deals with a message that could not be processed. One of a batch is only
// suspected: it must fail alone.
func (r *run) unavailable(d *delivery, f inbox.Failure) {
	if d.batched {
		r.suspects.Suspect(d.msg.ID)
		d.giveBack()
		return
	}
	d.s.trial.take(held{d, f})
}

// judge ends the trial when a probe went through: the servers are there, so a message that
// fails twice before such a probe has failed by itself. Then it is counted, as any other.
// The others stay away for a moment, so that they do not make the next pause at once.
func (s *session) judge() {
	for _, h := range s.trial.empty() {
		if !s.r.suspects.Strike(h.d.msg.ID) {
			s.r.aside.start(func() { s.r.later(h.d, suspectPause/2+rand.N(suspectPause), true) })
			continue
		}
		own := h.f
		own.Action, own.Counted, own.Unavailable = inbox.ActionRetry, true, false
		s.r.aside.start(func() { s.r.settle(h.d, own) }) // it may wait for the broker
	}
}
