package engine

import (
	"log/slog"
	"slices"
	"time"

	"github.com/holdfast-go/holdfast/inbox/driver"
)

// loop owns all state of a run and decides. It does no I/O and never blocks but in its select.
type loop struct {
	cfg       *settings
	signals   *signals
	hand      *hand
	trial     *trial
	pause     *pause
	receipts  *receipts
	moves     *moves
	outages   *outages
	concluder *concluder
	control   *control
	drain     *drain
	overruns  *overruns
	status    *status

	events   chan event
	jobs     chan<- *job
	acks     chan<- *settlement
	removals chan<- *removal
	timer    *time.Timer
	armed    time.Time // when the timer fires; zero: it does not
}

// run is the loop. It returns when the run is drained, or what hangs has been given up.
func (l *loop) run() {
	for {
		now := time.Now()
		for range len(l.events) { // this goroutine is the only reader
			l.apply(<-l.events, now)
		}
		if l.control.closed {
			return
		}
		if len(l.trial.held) > 0 { // before what has failed is judged: what begins now will tell
			l.handOut(now)
		}
		l.tick(now)
		l.handOut(now)
		l.control.steer(now)
		l.status.update(l)
		if !l.passOn(now) && len(l.events) == 0 {
			l.wait(now)
		}
	}
}

// passOn gives the acker and the mover what they can take at once. It reports whether there was any.
func (l *loop) passOn(now time.Time) (some bool) {
	if l.receipts.due(now) {
		select {
		case l.acks <- l.receipts.outgoing():
			l.receipts.handed()
			some = true
		default:
		}
	}
	if batch := l.moves.batch(now); batch != nil {
		select {
		case l.removals <- batch:
			l.moves.taken(batch, now)
			some = true
		default:
		}
	}
	return some
}

// wait waits for an event, for the acker or the mover, or until something is due.
func (l *loop) wait(now time.Time) {
	l.arm(now)
	var acks chan<- *settlement
	if l.receipts.due(now) {
		acks = l.acks
	}
	var removals chan<- *removal
	batch := l.moves.batch(now)
	if batch != nil {
		removals = l.removals
	}
	select {
	case ev := <-l.events:
		l.apply(ev, time.Now())
	case acks <- l.receipts.outgoing():
		l.receipts.handed()
	case removals <- batch:
		l.moves.taken(batch, now)
	case <-l.timer.C:
		l.armed = time.Time{}
	}
}

// apply takes an event.
func (l *loop) apply(ev event, now time.Time) {
	switch ev.kind {
	case begun:
		l.control.session = ev.session
	case started:
		l.control.started = true
		if l.control.current(ev) {
			l.pause.listen(now, probeWait)
		}
	case stopped:
		l.stopped(ev)
	case arrived:
		l.arrived(ev, now)
	case ended:
		l.ended(ev, now)
	case left:
		l.control.closed = true
	case finished:
		l.overruns.end(ev.job)
		l.concluder.conclude(ev.job, now)
	case settled:
		l.receipts.settled(ev.settlement)
	case moved:
		l.moves.moved(ev.removal, now)
	case halted:
		l.finish(now, ev.limit)
	case switched:
		l.switched(ev.by)
	}
}

func (l *loop) arrived(ev event, now time.Time) {
	telling := false // some may show whether a server is down
	for i := range ev.items {
		it := &ev.items[i]
		it.single = l.trial.has(it)
		it.aside = l.pause.gate == probing && !l.cfg.Ordered && !l.control.full() && l.trial.struck(it)
		l.hand.add(it, now)
		if it.aside && it.state == held {
			l.outages.setAside(it, now)
			continue
		}
		telling = true
	}
	if telling {
		l.pause.listen(now, probeGap)
	}
}

// switched begins or ends the pause of an operator.
func (l *loop) switched(by driver.Pause) {
	halted := !by.Since.IsZero()
	switch {
	case halted:
		l.cfg.Logger.Info("paused by an operator", slog.String("by", by.By), slog.String("reason", by.Reason), slog.Time("since", by.Since))
	case l.pause.told: // the first word is no news
		l.cfg.Logger.Info("resumed by an operator")
	}
	l.pause.halted, l.pause.told = halted, true
}

// stopped gives back what is not begun: before, it would have been handed out here once more.
func (l *loop) stopped(ev event) {
	if !l.control.current(ev) || l.control.last.wants != stop {
		return
	}
	if l.drain.on {
		l.trial.release()
		l.control.returned = true
	}
	l.receipts.giveBack(l.hand.notBegun(l.drain.on)...)
}

// ended forgets what the session has delivered: it comes again.
func (l *loop) ended(ev event, now time.Time) {
	if ev.session != nil {
		ev.session.ended = true
	}
	l.trial.release()
	l.pause.reopen()
	l.receipts.drop()
	l.moves.drop()
	l.signals.count(stale, "", l.hand.drop(now))
	l.control.ended(ev.err)
}

// tick does what is due.
func (l *loop) tick(now time.Time) {
	l.drain.pass(now)
	l.overruns.check(now)
	for _, it := range l.hand.due(now) {
		l.moves.due(it)
	}
	l.moves.countWaiting(now)
	if l.drain.on {
		return
	}
	if back := l.hand.outstayed(now); len(back) > 0 {
		l.trial.take(func(it *item) bool { return slices.Contains(back, it) })
		l.receipts.giveBack(back...)
	}
	l.outages.judge(now)
}

// handOut gives jobs to the workers.
func (l *loop) handOut(now time.Time) {
	if l.drain.on {
		return
	}
	queues := &l.hand.queues
	for {
		j := queues.next(now, l.pause.room(queues.left()))
		if j == nil {
			break
		}
		l.pause.begin(j)
		l.trial.begin(j)
		l.overruns.begin(j)
		l.jobs <- j // it has a place for each worker
	}
	for _, it := range queues.excess {
		o := away(it.m, queues.limits.away(it, now))
		o.outcome = putOff
		l.moves.send(it, o, now)
	}
	queues.excess = queues.excess[:0]
	if queues.used() {
		l.finish(now, "MessageLimit")
	}
}

// finish begins the drain, at a limit of the run or since it is to stop.
func (l *loop) finish(now time.Time, limit string) {
	if l.drain.on {
		return
	}
	if limit != "" {
		l.cfg.Logger.Info("limit reached, draining", slog.String("limit", limit))
	}
	l.drain.begin(now, l.cfg.ShutdownTimeout)
	l.moves.draining, l.moves.at = true, time.Time{}
}

// arm sets the timer to the next time at which something is due.
func (l *loop) arm(now time.Time) {
	at := earlier(l.overruns.next, earlier(l.drain.at, l.moves.wake(now)))
	at = earlier(at, l.receipts.wake(now))
	if !l.drain.on {
		at = earlier(at, earlier(l.hand.wake(), l.pause.wake()))
		at = earlier(at, later(l.hand.renewAt(), now))
		at = earlier(at, l.control.wake(now))
		if !l.pause.halted && l.pause.gate == open && len(l.trial.held) > 0 {
			at = earlier(at, l.trial.wake(l.hand.queues.limits.newest()))
		}
		if l.pause.room(l.hand.queues.left()) > 0 {
			at = earlier(at, l.hand.queues.wake(now))
		}
	}
	if at.IsZero() || !l.armed.IsZero() && !at.Before(l.armed) {
		return
	}
	l.armed = at
	l.timer.Reset(max(at.Sub(now), 0))
}
