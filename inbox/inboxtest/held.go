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
	failed int // on the consumer's clock
}

// unavailable keeps a message, and pauses, until another one tells whose failure it was. One of a
// batch is only suspected: it must fail alone.
func (c *Consumer) unavailable(d *delivery, f driver.Failure) {
	if d.batched {
		c.suspects.Suspect(d.msg.ID)
		c.giveBack(d)
		return
	}
	c.settle(func(q *queue) {
		c.clock++
		c.held = append(c.held, held{d, f, c.clock})
		q.waiting++
	})
	c.pause()
}

// passed judges those that failed before a message began that went through: a message that fails
// twice before such a one has failed by itself.
func (c *Consumer) passed(d *delivery) {
	c.suspects.Clear(d.msg.ID)
	for _, h := range c.failedBefore(d.began) {
		if c.suspects.Strike(h.d.msg.ID) {
			c.suspects.Clear(h.d.msg.ID)
			own := h.f
			own.Action, own.Counted, own.Unavailable = driver.ActionRetry, true, false
			c.conclude(context.Background(), h.d, own)
			continue
		}
		c.settle(func(*queue) { c.later(h.d, pauseTime) })
	}
}

// failedBefore takes those that failed before a moment; they are in flight again.
func (c *Consumer) failedBefore(moment int) (all []held) {
	c.broker.mu.Lock()
	defer c.broker.mu.Unlock()
	n := 0
	for n < len(c.held) && c.held[n].failed < moment {
		n++
	}
	all, c.held = c.held[:n:n], c.held[n:]
	c.queue.waiting -= n
	c.queue.inFlight += n
	return all
}

// release puts what was kept to the front of the queue, blaming none. The lock is held.
func (c *Consumer) release() {
	q := c.queue
	back := make([]*delivery, 0, len(c.held)+len(q.ready))
	for _, h := range c.held {
		h.d.msg.Redelivered = true
		back = append(back, h.d)
	}
	q.waiting -= len(c.held)
	q.ready, c.held = append(back, q.ready...), nil
}

// later puts a message to the end of the queue after a pause. The lock is held.
func (c *Consumer) later(d *delivery, pause time.Duration) {
	d.msg.Redelivered = false // it is a new copy
	q := c.queue
	q.waiting++
	time.AfterFunc(pause, func() {
		c.broker.change(func() {
			q.waiting--
			q.ready = append(q.ready, d)
		})
	})
}
