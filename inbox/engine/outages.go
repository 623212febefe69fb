package engine

import (
	"log/slog"
	"time"
)

// outages holds what fails for want of a server until others show whether the server is down, and
// pauses the consumer while it is. The loop alone uses it.
type outages struct {
	cfg   *settings
	hand  *hand
	trial *trial
	pause *pause
	moves *moves
}

// keep holds a message that could not be processed for want of a server.
func (o *outages) keep(it *item, now time.Time) {
	it.state = held
	o.pause.cause = it.fate.failure.Err
	if o.trial.struck(it) {
		o.hand.crowd.add(it)
	}
	o.crowdOut(o.trial.failed(it, now), now)
}

// setAside keeps a message from being a probe. A probe of one that has failed while others went through
// shows nothing, and the queue may have many of those at its head.
func (o *outages) setAside(it *item, now time.Time) {
	o.pause.aside++
	o.hand.crowd.add(it)
	o.crowdOut(o.trial.keep(it, now), now)
}

// crowdOut has the oldest on trial make room. Given back it would come first again from some queues.
func (o *outages) crowdOut(oldest *item, now time.Time) {
	if oldest != nil {
		o.spare([]*item{oldest}, now)
	}
}

// spare has messages come again after the others, blaming none.
func (o *outages) spare(items []*item, now time.Time) {
	for _, it := range items {
		o.moves.send(it, away(it.m, suspectPause/2+time.Duration(o.cfg.Rand()*float64(suspectPause))), now)
	}
}

// judge looks at what fails, and moves a pause on.
func (o *outages) judge(now time.Time) {
	if o.pause.halted {
		return
	}
	switch o.pause.gate {
	case open:
		if len(o.trial.held) == 0 {
			return
		}
		outage, inDoubt, spared := o.trial.judge(now, o.hand.queues.limits.newest())
		o.spare(spared, now)
		switch {
		case outage:
			o.shut(now)
		case inDoubt:
			o.doubt(now)
		}
	case shut:
		if now.Before(o.pause.at) {
			return
		}
		o.pause.probe(o.hand.queues.left())
		if o.cfg.Ordered { // what is in hand are the probes
			o.pause.listen(now, probeGap)
		}
	case probing:
		o.probe(now)
	}
}

func (o *outages) probe(now time.Time) {
	switch o.pause.verdict(now, len(o.trial.held)) {
	case undecided:
		o.pause.grow(now)
	case stillDown:
		o.shut(now)
	case nothingDown:
		o.reopen(now)
	case noOther:
		o.pause.inPlace = true
		o.pause.listen(now, probeGap)
		o.release()
	}
}

// doubt has those that have failed be tried again, before there is a pause.
func (o *outages) doubt(now time.Time) {
	o.pause.doubt(o.hand.queues.left())
	o.pause.listen(now, probeGap)
	o.release()
}

func (o *outages) shut(now time.Time) {
	delay := o.pause.shut(now, o.cfg.Rand())
	o.cfg.Logger.Warn("paused", slog.String("why", "a server that processing needs is unavailable"),
		slog.Duration("again_in", delay), slog.Any("error", o.pause.cause))
}

// reopen ends a pause. Those that have failed before come again later: at once they would look like the
// next outage.
func (o *outages) reopen(now time.Time) {
	o.pause.reopen()
	o.spare(o.trial.take(o.trial.struck), now)
	o.release()
}

// release has the messages on trial be tried again.
func (o *outages) release() {
	for _, it := range o.trial.release() {
		o.hand.crowd.remove(it)
		it.alone, it.asked = false, false
		o.hand.queues.ready(it)
	}
}
