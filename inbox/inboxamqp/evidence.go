package inboxamqp

import (
	"math/rand/v2"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/inbox/driver"
)

const (
	// outage is how many messages fail for want of a server before the consumer pauses at once.
	outage = 16

	// controlPatience is how long one waits for another message to go through, before the
	// consumer pauses.
	controlPatience = 300 * time.Millisecond

	// suspectPause is how long a suspect stays away while others go through, spread by half.
	suspectPause = 2 * time.Second
)

// pauseRequest comes from a delivery, and counts only in the epoch of that.
type pauseRequest struct {
	epoch int64
	why   error
}

// evidence is what the messages of one session show: that a server is down, that they fail by
// themselves, or that too many of them wait. Workers report to it, and the session reads pauses and
// doubts.
type evidence struct {
	prefetch int
	mover    *mover
	workers  *workers

	pauses chan pauseRequest
	doubts chan struct{} // tells that a message failed for want of a server
	trial  trial

	mu      sync.Mutex
	epoch   int64 // in which waiting was counted
	waiting int   // messages that wait without a worker
}

func newEvidence(prefetch int, m *mover, w *workers) *evidence {
	return &evidence{prefetch: prefetch, mover: m, workers: w, pauses: make(chan pauseRequest, 1), doubts: make(chan struct{}, 1)}
}

// begin takes the evidence of a new epoch.
func (e *evidence) begin(epoch int64) {
	e.trial.open(epoch)
	select {
	case <-e.pauses: // of an earlier epoch; it would keep a new one out
	default:
	}
}

func (e *evidence) request(epoch int64, why error) {
	select {
	case e.pauses <- pauseRequest{epoch, why}:
	default: // there is one already
	}
}

// unavailable takes a message that could not be processed for want of a server. One of a batch is
// only suspected: it must fail alone.
func (e *evidence) unavailable(d *delivery, f driver.Failure) {
	suspects := &e.workers.suspects
	if d.batched {
		suspects.Suspect(d.msg.ID)
		d.giveBack()
		return
	}
	struck := suspects.Struck(d.msg.ID)
	if fresh := e.trial.take(held{d, f, e.workers.clock.Add(1), time.Now(), struck}); fresh >= min(outage, e.prefetch) {
		e.request(d.epoch, errPause)
	}
	if struck {
		e.countWaiting(d.epoch)
	}
	select {
	case e.doubts <- struct{}{}:
	default:
	}
}

// passed ends the trial of those that failed before a message began that went through: the servers
// are there. So a message that fails twice before such a one has failed by itself. Then it is
// counted, as any other. The others stay away for a moment.
func (e *evidence) passed(began uint64) {
	for _, h := range e.trial.before(began) {
		if !e.workers.suspects.Strike(h.d.msg.ID) {
			e.sendAway(h.d)
			continue
		}
		own := h.f
		own.Action, own.Counted, own.Unavailable = driver.ActionRetry, true, false
		e.mover.aside.start(func() { // it may wait for the broker
			e.workers.settle(h.d, own)
			e.workers.suspects.Strike(h.d.msg.ID) // one is enough for its next attempt
		})
	}
}

// judge ends the wait for a message that goes through, after some time. It is false where all that
// wait have failed like this before: they stay away for a moment, and are not blamed.
func (e *evidence) judge() (outage bool) {
	if e.trial.waited() >= controlPatience {
		return true
	}
	for _, h := range e.trial.struck() {
		e.sendAway(h.d)
	}
	return false
}

// sendAway has a message come again after the others.
func (e *evidence) sendAway(d *delivery) {
	e.mover.aside.start(func() { e.mover.later(d, suspectPause/2+rand.N(suspectPause), true) })
}

// countWaiting counts one more message that waits without a worker. When half of the prefetch does,
// consuming begins anew: a new consumer has all of it.
func (e *evidence) countWaiting(epoch int64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.epoch < epoch {
		e.epoch, e.waiting = epoch, 0
	}
	if e.epoch > epoch {
		return
	}
	e.waiting++
	if e.waiting >= (e.prefetch+1)/2 {
		e.request(epoch, errCrowded)
	}
}
