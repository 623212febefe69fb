package engine

import (
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/holdfast-go/holdfast/inbox/driver"
)

// concluder decides what becomes of messages that a worker has finished with. The loop alone uses it.
type concluder struct {
	cfg      *settings
	hand     *hand
	trial    *trial
	pause    *pause
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
		down := f != nil && (f.kind == hasFailed && f.failure.Unavailable || f.kind == unclaimed)
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
		c.reopen(now)
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
		logFailure(c.cfg.Logger, other.m, other.fate)
		c.moves.send(other, send(c.cfg, other.m, other.fate), now)
	}
	c.spare(spared, now)
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
	case f.kind == elsewhere || f.kind == unclaimed: // it is asked for again
		c.hand.lost(it)
	case f.kind == suspect:
		it.alone, it.looked = true, true
		c.hand.queues.ready(it)
	case c.moves.draining && f.decision.Action == driver.ActionReturn:
		c.receipts.giveBack(it)
	case f.failure.Unavailable:
		c.unavailable(it, now)
	default:
		c.trial.clear(it)
		c.moves.send(it, send(c.cfg, it.m, f), now)
	}
}

// unavailable keeps a message that could not be processed for want of a server.
func (c *concluder) unavailable(it *item, now time.Time) {
	it.state = held
	if c.trial.struck(it) {
		c.hand.crowd.add(it)
	}
	c.crowdOut(c.trial.failed(it, now), now)
}

// setAside keeps a message from being a probe. A probe of one that has failed while others went through
// shows nothing, and the queue may have many of those at its head.
func (c *concluder) setAside(it *item, now time.Time) {
	c.pause.aside++
	c.hand.crowd.add(it)
	c.crowdOut(c.trial.keep(it, now), now)
}

// crowdOut has the oldest on trial make room. Given back it would come first again from some queues.
func (c *concluder) crowdOut(oldest *item, now time.Time) {
	if oldest != nil {
		c.spare([]*item{oldest}, now)
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

// spare has messages come again after the others, blaming none.
func (c *concluder) spare(items []*item, now time.Time) {
	for _, it := range items {
		c.moves.send(it, away(it.m, suspectPause/2+rand.N(suspectPause)), now)
	}
}

// judge looks at what fails, and moves a pause on.
func (c *concluder) judge(now time.Time) {
	switch c.pause.gate {
	case open:
		outage, spared := c.trial.judge(now)
		c.spare(spared, now)
		if outage {
			c.shut(now)
		}
	case shut:
		if now.Before(c.pause.at) {
			return
		}
		c.pause.probe(c.hand.queues.left())
		if c.cfg.Ordered { // what is in hand are the probes
			c.pause.listen(now, probeGap)
		}
	case probing:
		c.probe(now)
	}
}

func (c *concluder) probe(now time.Time) {
	switch c.pause.verdict(now, len(c.trial.held)) {
	case stillDown:
		c.shut(now)
	case nothingDown:
		c.reopen(now)
	case noOther:
		c.pause.inPlace = true
		c.pause.listen(now, probeGap)
		c.release()
	}
}

func (c *concluder) shut(now time.Time) {
	delay := c.pause.shut(now, c.cfg.Rand())
	c.cfg.Logger.Warn("paused", slog.String("why", "a server that processing needs is unavailable"), slog.Duration("again_in", delay))
}

// reopen ends a pause. Those that have failed before come again later: at once they would look like the
// next outage.
func (c *concluder) reopen(now time.Time) {
	c.pause.reopen()
	c.spare(c.trial.takeStruck(), now)
	c.release()
}

// release has the messages on trial be tried again.
func (c *concluder) release() {
	for _, it := range c.trial.release() {
		c.hand.crowd.remove(it)
		it.alone, it.looked = false, false
		c.hand.queues.ready(it)
	}
}
