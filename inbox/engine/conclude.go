package engine

import (
	"errors"
	"time"

	"github.com/holdfast-go/holdfast/inbox/driver"
)

// concluder decides what becomes of messages that a worker has finished with. The loop alone uses it.
type concluder struct {
	cfg      *settings
	hand     *hand
	trial    *trial
	pause    *pause
	outages  *outages
	receipts *receipts
	moves    *moves
}

// conclude takes a job that is finished.
func (c *concluder) conclude(j *job, now time.Time) {
	over := false
	c.hand.queues.ended(j, now)
	var unavailable []*item
	for i, it := range j.items {
		it.m = j.msgs[i]
		var f *fate
		if j.fates != nil {
			f = j.fates[i]
		}
		it.fate = f
		down := f != nil && (f.kind == hasFailed && f.failure.Unavailable)
		over = c.pause.probed(it, down, f == nil) || over
		switch {
		case f == nil:
			c.passed(it, now)
		case it.session.over.Load() || it.orphan: // it comes again
			c.remember(it, f)
			c.receipts.giveBack(it)
		case down && it.batched:
			unavailable = append(unavailable, it)
		default:
			c.failed(it, f, now)
		}
	}
	if len(unavailable) > 0 {
		c.together(unavailable)
	}
	c.hand.queues.done(j)
	if over {
		c.outages.reopen(now)
	}
}

// passed ends a message that went through, and judges those that have failed for want of a server.
func (c *concluder) passed(it *item, now time.Time) {
	guilty, spared := c.trial.passed(it)
	if it.session.over.Load() {
		c.receipts.giveBack(it)
	} else {
		c.receipts.ack(it, false)
	}
	for _, other := range guilty {
		if other.fate == nil { // a copy of it has failed, and this one was set aside
			spared = append(spared, other)
			continue
		}
		other.fate = own(c.cfg, other.m, other.fate, now)
		logFailure(c.cfg, other.m, other.fate)
		c.moves.send(other, send(c.cfg, other.m, other.fate), now)
	}
	c.outages.spare(spared, now)
}

// remember notes how far an ordered message has got whose session has ended.
func (c *concluder) remember(it *item, f *fate) {
	if c.cfg.Ordered && f.kind == hasFailed && f.decision.Action == driver.ActionRetry {
		o := send(c.cfg, it.m, f)
		it.m, it.due = advance(it.m, o.next), f.at.Add(o.delay)
	}
}

// failed decides over a message that did not go through.
func (c *concluder) failed(it *item, f *fate, now time.Time) {
	switch {
	case f.kind == leftover:
		c.receipts.ack(it, true)
	case f.kind == suspect:
		it.alone, it.asked = true, true
		c.hand.queues.ready(it)
	case c.moves.draining && f.decision.Action == driver.ActionReturn:
		c.receipts.giveBack(it)
	case f.failure.Unavailable:
		c.outages.keep(it, now)
	default:
		c.trial.clear(it)
		if errors.Is(f.failure.Err, driver.ErrRefused) { // its key is stopped, and too many messages wait
			c.moves.noteRefusal(c.cfg.place(order{target: toStop}, ""), f.failure.Err, now)
		}
		c.moves.send(it, send(c.cfg, it.m, f), now)
	}
}

// together has each of the messages of a batch be tried alone: one of them may be the reason.
func (c *concluder) together(items []*item) {
	c.trial.suspect(items)
	for _, it := range items {
		if c.moves.draining {
			c.receipts.giveBack(it)
			continue
		}
		it.single = true
		c.hand.queues.ready(it)
	}
}
