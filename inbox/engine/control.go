package engine

import (
	"context"
	"time"
)

const (
	// maxWaiting and maxWaitingBytes bound the messages that wait without a worker.
	maxWaiting      = 1000
	maxWaitingBytes = 64 << 20
)

// ofDrain is the serial of a drain's wishes. Those of windows are not negative, and those of probes
// are for messages.
const ofDrain = -1

// control tells the receiver what to do, and knows the session that it has.
type control struct {
	cfg      *settings
	hand     *hand
	pause    *pause
	drain    *drain
	receipts *receipts
	moves    *moves
	ctx      context.Context
	wishes   chan wish // one place: a later wish takes that of an earlier one
	session  *session  // nil: none
	started  bool      // it receives, or did
	err      error     // why there is none
	ends     int       // of sessions
	last     wish
	end      context.CancelFunc // of the last wish
	serial   int                // of the window
	returned bool               // in a drain, what was not begun is given back
	closed   bool               // the receiver has left
	lookAt   time.Time          // when the next window may begin because of messages of one name that its limit keeps back
}

// steer tells the receiver what to do.
func (c *control) steer(now time.Time) {
	switch {
	case c.drain.on:
		c.steerDrain()
	case c.cfg.Ordered:
		c.steerOrdered(now)
	case c.pause.halted || c.pause.gate == shut:
		c.wants(stop, 0, c.serial)
	case c.pause.gate == probing && !c.pause.early:
		c.wants(listen, c.pause.window(), -c.pause.round)
	default:
		if c.crowded() && !c.full() && c.looksBehind(now) {
			c.serial++
		}
		c.wants(listen, c.cfg.Prefetch, c.serial)
	}
}

// steerOrdered keeps one window, and begins the session anew before the broker takes messages back
// that have to wait, or where it has taken one back: so they come again in their order.
func (c *control) steerOrdered(now time.Time) {
	at := c.hand.renewAt()
	if c.session != nil && (c.last.wants == renew || c.hand.broken || !at.IsZero() && !now.Before(at)) {
		c.wants(renew, 0, c.serial)
		return
	}
	c.wants(listen, c.cfg.Prefetch, c.serial)
}

// steerDrain has nothing more come, and ends the session when all is settled that can be. An ordered
// consumer keeps what it has: its queue must not go to another one before.
func (c *control) steerDrain() {
	switch {
	case (c.returned || c.cfg.Ordered || c.drain.abandoned) && c.idle():
		c.wants(leave, 0, 0)
	case c.cfg.Ordered:
		c.wants(rest, 0, 0)
	default:
		c.wants(stop, 0, ofDrain) // another wish than that of a pause: what is held goes back, too
	}
}

// idle reports whether nothing runs, or what does has been given up, and nothing is on its way.
func (c *control) idle() bool {
	return (len(c.hand.queues.limits.jobs) == 0 || c.drain.abandoned) &&
		c.receipts.empty() && len(c.moves.pending)+len(c.moves.under) == 0
}

// wants says what the receiver is to do. What it does already goes on.
func (c *control) wants(what want, window, serial int) {
	if c.last.wants == what && c.last.window == window && c.last.serial == serial {
		return
	}
	if c.end != nil {
		c.end()
	}
	if what == listen {
		c.hand.crowd.renew()
	}
	ctx, end := context.WithCancel(c.ctx)
	c.last, c.end = wish{wants: what, window: window, serial: serial, ctx: ctx}, end
	select {
	case <-c.wishes:
	default:
	}
	c.wishes <- c.last // the loop alone sends
}

// ended notes the end of a session, or of the attempt at one.
func (c *control) ended(why error) {
	c.session, c.started, c.err, c.ends = nil, false, why, c.ends+1
	c.returned = c.returned || c.drain.on
	if c.last.wants == renew {
		c.serial++
		c.last.wants = 0
	}
}

// current reports whether an event is about the wish that holds.
func (c *control) current(ev event) bool { return ev.serial == c.last.serial }

// lookPause is the time between two new windows because of messages that a limit keeps back, while their name is
// the only one in the queue. A new window costs the broker two calls, and a fast handler uses one up in milliseconds.
const lookPause = time.Second

// looksBehind reports whether a new window may begin now. Because of messages that a limit keeps back, one begins
// only while few of them wait. It begins at once where names share the queue, and else after lookPause.
func (c *control) looksBehind(now time.Time) bool {
	limits := &c.hand.queues.limits
	if limits.blocked == 0 {
		return true
	}
	if limits.full() {
		return false
	}
	if !limits.alone(limits.latest.name, now) {
		return true
	}
	if now.Before(c.lookAt) {
		return false
	}
	c.lookAt = now.Add(lookPause)
	return true
}

// wake returns when a new window may begin that no event tells of; zero: at no time known.
func (c *control) wake(now time.Time) time.Time {
	if limits := &c.hand.queues.limits; limits.blocked == 0 || limits.full() || !c.crowded() {
		return time.Time{}
	}
	return later(c.lookAt, now)
}

// crowded reports whether messages that wait without a worker have half of the window. A new one
// has all of it.
func (c *control) crowded() bool { return c.hand.crowd.now >= (c.cfg.Prefetch+1)/2 }

// full reports whether so many wait that no more may come. Those that a limit keeps back wait for nothing that has
// to be fixed.
func (c *control) full() bool {
	crowd := &c.hand.crowd
	limits := &c.hand.queues.limits
	n := crowd.n - limits.blocked
	if c.cfg.Ordered {
		return n >= c.cfg.Prefetch
	}
	return n >= maxWaiting || crowd.bytes-limits.bytes >= maxWaitingBytes
}
