package inboxtest

import (
	"context"
	"time"

	"github.com/holdfast-go/holdfast/inbox/driver"
)

// held is a message that could not be processed, for want of a server as it seems.
type held struct {
	d      *delivery
	f      driver.Failure
	failed int // on the broker's clock
}

// unavailable keeps a message, and pauses, until another one tells whose failure it was. One of a
// batch is only suspected: it must fail alone.
func (b *Broker) unavailable(d *delivery, f driver.Failure) {
	if d.batched {
		b.suspects.Suspect(d.msg.ID)
		b.giveBack(d)
		return
	}
	b.settle(func() {
		b.clock++
		b.held = append(b.held, held{d, f, b.clock})
	})
	b.pause()
}

// passed judges those that failed before a message began that went through: a message that fails
// twice before such a one has failed by itself.
func (b *Broker) passed(d *delivery) {
	b.suspects.Clear(d.msg.ID)
	for _, h := range b.failedBefore(d.began) {
		if b.suspects.Strike(h.d.msg.ID) {
			b.suspects.Clear(h.d.msg.ID)
			own := h.f
			own.Action, own.Counted, own.Unavailable = driver.ActionRetry, true, false
			b.conclude(context.Background(), h.d, own)
			continue
		}
		b.settle(func() { b.later(h.d, b.cfg.Pause) })
	}
}

// failedBefore takes those that failed before a moment; they are in flight again.
func (b *Broker) failedBefore(moment int) (all []held) {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := 0
	for n < len(b.held) && b.held[n].failed < moment {
		n++
	}
	all, b.held = b.held[:n:n], b.held[n:]
	b.inFlight += n
	return all
}

// release puts what was kept to the front of the queue, blaming none. The lock is held.
func (b *Broker) release() {
	back := make([]*delivery, 0, len(b.held)+len(b.ready))
	for _, h := range b.held {
		h.d.msg.Redelivered = true
		back = append(back, h.d)
	}
	b.ready, b.held = append(back, b.ready...), nil
}

// later puts a message to the end of the queue after a pause. The lock is held.
func (b *Broker) later(d *delivery, pause time.Duration) {
	d.msg.Redelivered = false // it is a new copy
	b.delayed++
	time.AfterFunc(pause, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.delayed--
		b.ready = append(b.ready, d)
		b.changed.Broadcast()
	})
}
