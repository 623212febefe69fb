package engine

import (
	"context"
	"log/slog"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// event is a message from another goroutine to the loop. Only the fields of its kind are set.
type event struct {
	kind       kind
	session    *session                // opened, listening, stopped, received, ended
	serial     int                     // listening, stopped: of the command
	items      []item                  // received
	job        *job                    // finished
	settlement *settlement             // settled
	removal    *removal                // moved
	err        error                   // ended: the cause; nil if the loop ended it
	limit      string                  // halted: the limit that was reached; empty: the caller's ctx
	by         driver.Pause            // switched: an operator's pause; zero: none
	answer     chan<- []driver.Running // inquired; it has room for one
}

type kind uint8

const (
	opened    kind = iota + 1 // a session
	listening                 // it receives messages
	stopped                   // it receives none; there may be no session
	received                  // messages
	ended                     // a session, or the attempt at one
	left                      // the receiver, for good
	finished                  // a job
	settled                   // acknowledgements
	moved                     // messages
	mustEnd                   // the run must end
	switched                  // an operator's pause
	inquired                  // for the messages in work
)

// loop owns all state of a run and makes the decisions. It does no I/O, and blocks only in wait.
type loop struct {
	cfg    *settings
	meters *instruments
	status *status

	inflight *inflight
	outage   *outage
	acks     *acks
	outbound *outgoing
	link     *link
	drain    *drain
	overruns *overruns
	alarm    *alarm
	changed  bool // this turn did something after its steps asked the alarm

	events   chan event
	jobs     chan<- *job
	settling chan<- *settlement
	moving   chan<- *removal
}

// run is the loop. Each turn takes events, acts on everything that is due, starts jobs, commands the
// receiver, and gives work to the acker and the movers. A step that is too early asks the alarm for a later
// turn. A turn that changed something is followed by another one, because its later steps may affect the
// earlier ones. Otherwise the loop waits. It returns when the run is drained or abandoned.
func (l *loop) run() {
	for {
		now := time.Now()
		for range len(l.events) { // this goroutine is the only reader
			l.apply(<-l.events, now)
		}
		if l.link.closed {
			return
		}
		l.alarm.reset(now)
		l.changed = false
		if len(l.outage.suspects) > 0 { // before they are weighed: jobs that start now will show who is at fault
			l.start(now)
		}
		l.tick(now)
		l.start(now)
		l.steer(now)
		l.status.update(l)
		l.send(now)
		if !l.changed && len(l.events) == 0 {
			l.wait()
		}
	}
}

// send gives the acker and the movers as much as they can take now.
func (l *loop) send(now time.Time) {
	if l.acks.due(now, l.inflight.queues.idle(), l.alarm) {
		select {
		case l.settling <- l.acks.next:
			l.acks.taken()
			l.changed = true
		default:
		}
	}
	if batch := l.outbound.batch(now, l.alarm); batch != nil {
		select {
		case l.moving <- batch:
			l.outbound.taken(batch, now)
			l.changed = true
		default:
		}
	}
}

// wait waits for an event, for the acker or a mover, or for the alarm.
func (l *loop) wait() {
	now := l.alarm.now
	var settling chan<- *settlement
	if l.acks.due(now, l.inflight.queues.idle(), l.alarm) {
		settling = l.settling
	}
	var moving chan<- *removal
	batch := l.outbound.batch(now, l.alarm)
	if batch != nil {
		moving = l.moving
	}
	select {
	case ev := <-l.events:
		l.apply(ev, time.Now())
	case settling <- l.acks.next:
		l.acks.taken()
	case moving <- batch:
		l.outbound.taken(batch, now)
	case <-l.alarm.set():
		l.alarm.rang()
	}
}

// apply handles an event.
func (l *loop) apply(ev event, now time.Time) {
	switch ev.kind {
	case opened:
		l.link.session = ev.session
	case listening:
		l.link.started = true
		if l.link.current(ev) {
			l.outage.awaitMessages(now, probeWait)
		}
	case stopped:
		l.stopped(ev)
	case received:
		l.received(ev.items, now)
	case ended:
		l.ended(ev, now)
	case left:
		l.link.closed = true
	case finished:
		l.overruns.end(ev.job)
		l.conclude(ev.job, now)
	case settled:
		l.acks.settled(ev.settlement)
	case moved:
		l.moved(ev.removal, now)
	case mustEnd:
		l.finish(now, ev.limit)
	case switched:
		l.switched(ev.by, now)
	case inquired:
		ev.answer <- l.inflight.queues.limits.inWork()
	}
}

// received takes deliveries.
func (l *loop) received(items []item, now time.Time) {
	probes := false // some may show whether a server is down
	for i := range items {
		it := &items[i]
		if l.outage.wasSuspect(it) {
			it.mode = single
		}
		aside := l.outage.sets(it) && !l.inflight.full()
		l.inflight.add(it, aside, now)
		if it.state == suspected {
			l.do(action{it: it, do: suspect}, now)
			continue
		}
		probes = true
	}
	if probes {
		l.outage.awaitMessages(now, probeGap)
	}
}

// switched begins or ends an operator's pause.
func (l *loop) switched(by driver.Pause, now time.Time) {
	halted := !by.Since.IsZero()
	switch {
	case halted:
		l.cfg.Logger.Info("paused by an operator", slog.String("by", by.By), slog.String("reason", by.Reason), slog.Time("since", by.Since))
	case l.outage.told: // the first report changes nothing
		l.cfg.Logger.Info("resumed by an operator")
	}
	l.outage.halted, l.outage.told = halted, true
	if !halted { // a probe starts again
		l.outage.awaitMessages(now, probeWait)
	}
}

// stopped requeues the messages that have not started. Before it, the broker would have delivered them here again.
func (l *loop) stopped(ev event) {
	if !l.link.current(ev) || l.link.last.does != stop {
		return
	}
	if l.drain.on {
		l.outage.release()
		l.link.returned = true
	}
	for _, it := range l.inflight.unstarted(l.drain.on) {
		l.requeue(it)
	}
}

// ended forgets the deliveries of a session, because the broker redelivers them.
func (l *loop) ended(ev event, now time.Time) {
	if ev.session != nil {
		ev.session.ended = true
	}
	l.outage.reset()
	for _, it := range l.outbound.drop() {
		l.inflight.to(it, lost)
	}
	l.meters.count(stale, "", l.acks.drop()+l.inflight.drop(now))
	l.link.endedWith(ev.err)
	if l.drain.on {
		l.link.returned = true
	}
}

// tick acts on everything that is due.
func (l *loop) tick(now time.Time) {
	l.drain.step(now, l.alarm)
	for _, j := range l.overruns.stuckOnes(now, l.inflight.queues.limits.jobs, l.alarm) {
		for _, it := range j.items { // no probe waits for its messages
			l.outage.probeEnded(it, false, false)
		}
	}
	for _, it := range l.inflight.due(now, l.alarm) {
		l.out(it)
	}
	for _, it := range l.outbound.slow(now, l.alarm) {
		l.inflight.waiting.add(it)
	}
	if l.drain.on {
		return
	}
	if back := l.inflight.overstayed(now, l.alarm); len(back) > 0 {
		l.outage.forget(back)
		for _, it := range back {
			l.requeue(it)
		}
	}
	queues := &l.inflight.queues
	l.all(l.outage.step(now, queues.limits.newest(), queues.left(), l.alarm), now)
}

// start gives jobs to the workers.
func (l *loop) start(now time.Time) {
	if l.drain.on {
		return
	}
	queues := &l.inflight.queues
	for {
		j := queues.next(now, l.outage.room(queues.left()), l.alarm)
		if j == nil {
			break
		}
		l.changed = true
		l.outage.begin(j)
		l.overruns.begin(j)
		l.jobs <- j // it has a place for each worker
	}
	for _, it := range queues.excess {
		o := away(it.m, queues.limits.away(it, now))
		o.as = putOff
		l.move(it, o, now)
	}
	queues.excess = queues.excess[:0]
	if queues.used() {
		l.finish(now, "MessageLimit")
	}
}

// finish begins the drain, because a limit of the run is reached or the run must end.
func (l *loop) finish(now time.Time, limit string) {
	if l.drain.on {
		return
	}
	if limit != "" {
		l.cfg.Logger.Info("limit reached, draining", slog.String("limit", limit))
	}
	l.changed = true
	l.drain.begin(now, l.cfg.ShutdownTimeout)
	l.outbound.at = time.Time{}
}

// steer sends commands to the receiver.
func (l *loop) steer(now time.Time) {
	switch f := l.inflight; {
	case l.drain.on:
		l.steerDrain()
	case l.cfg.Ordered:
		l.steerOrdered(now)
	case l.outage.halted || l.outage.gate == shut:
		l.command(stop, 0, l.link.serial)
	case l.outage.gate == probing && !l.outage.early:
		l.command(listen, l.outage.window(), -l.outage.round)
	default:
		if f.crowded() && !f.full() && f.queues.limits.opensWindow(now, l.alarm) {
			l.link.serial++
		}
		l.command(listen, l.cfg.Prefetch, l.link.serial)
	}
}

// steerOrdered keeps one window. It renews the session before the broker would take back waiting messages,
// and after the broker has taken one back. So the messages are redelivered in their order.
func (l *loop) steerOrdered(now time.Time) {
	at := l.inflight.renewAt()
	due := !at.IsZero() && !now.Before(at)
	if l.link.session != nil && (l.link.last.does == renew || l.inflight.broken || due) {
		l.command(renew, 0, l.link.serial)
		return
	}
	l.alarm.by(at)
	l.command(listen, l.cfg.Prefetch, l.link.serial)
}

// steerDrain stops the deliveries, and ends the session when everything that can be settled is settled. An
// ordered consumer keeps its messages until then, because another consumer must not get its queue earlier.
func (l *loop) steerDrain() {
	switch {
	case (l.link.returned || l.cfg.Ordered || l.drain.abandoned) && l.settledAll():
		l.command(leave, 0, 0)
	case l.cfg.Ordered:
		l.command(rest, 0, 0)
	default:
		l.command(stop, 0, ofDrain) // not the command of a pause: suspected and delayed messages are requeued too
	}
}

// settledAll reports whether nothing runs, or the handlers are abandoned, and nothing is left to settle or to move.
func (l *loop) settledAll() bool {
	return (len(l.inflight.queues.limits.jobs) == 0 || l.drain.abandoned) &&
		l.acks.empty() && len(l.outbound.pending)+len(l.outbound.under) == 0
}

// command sends a command to the receiver unless it is already in force.
func (l *loop) command(does does, window, serial int) {
	if l.link.send(does, window, serial) && does == listen {
		l.inflight.waiting.renew()
	}
}

// command is an instruction in force until the next command. That one ends ctx.
type command struct {
	does   does
	window int
	serial int // distinguishes commands for the same window: the later one starts a new count
	ctx    context.Context
}

type does uint8

const (
	listen does = iota + 1 // receive messages
	stop                   // receive none
	rest                   // receive none, and keep deliveries that still arrive: ordered consumers requeue all of them together
	renew                  // end this session and open the next one
	leave                  // end it for good
)

// ofDrain is the serial of a drain's commands. Serials of windows are not negative, and serials of probes are
// message counts.
const ofDrain = -1

// link is the loop's side of the receiver: the last command, and the session that the receiver has.
type link struct {
	ctx      context.Context
	commands chan command // one place: a later command replaces an earlier one
	last     command
	cancel   context.CancelFunc // of the last command
	serial   int                // of the window

	session  *session // nil: none
	started  bool     // it receives, or did
	err      error    // why there is no session
	ends     int      // of sessions
	returned bool     // in a drain: the messages that have not started are requeued
	closed   bool     // the receiver has left
}

// send replaces the receiver's command, and reports whether it is a new one.
func (k *link) send(does does, window, serial int) bool {
	if k.last.does == does && k.last.window == window && k.last.serial == serial {
		return false
	}
	if k.cancel != nil {
		k.cancel()
	}
	ctx, cancel := context.WithCancel(k.ctx)
	k.last, k.cancel = command{does: does, window: window, serial: serial, ctx: ctx}, cancel
	select {
	case <-k.commands:
	default:
	}
	k.commands <- k.last // the loop alone sends
	return true
}

// endedWith records the end of a session, or a failed attempt to open one.
func (k *link) endedWith(err error) {
	k.session, k.started, k.err, k.ends = nil, false, err, k.ends+1
	if k.last.does == renew {
		k.serial++
		k.last.does = 0
	}
}

// current reports whether an event is about the last command.
func (k *link) current(ev event) bool { return ev.serial == k.last.serial }

// reserve is the part of ShutdownTimeout left after the handlers are cancelled, for settling their messages
// and ending the session.
func reserve(shutdown time.Duration) time.Duration { return min(shutdown/10, 6*time.Second) }

// drain is the end of a run: nothing more starts, then the handlers are cancelled, then they are abandoned.
type drain struct {
	halt    context.CancelFunc      // ends the work of the other goroutines
	abort   context.CancelCauseFunc // cancels the handlers
	abandon func()                  // records that handlers are abandoned

	on        bool
	aborted   bool
	abandoned bool
	at        time.Time // of the next step; zero: there is none
	reserve   time.Duration
}

func (d *drain) begin(now time.Time, shutdown time.Duration) {
	d.halt()
	d.on, d.reserve = true, reserve(shutdown)
	d.at = now.Add(shutdown - d.reserve)
}

// step performs the steps that are due.
func (d *drain) step(now time.Time, wake *alarm) {
	for d.on && !d.at.IsZero() && !now.Before(d.at) {
		if d.aborted {
			d.abandoned, d.at = true, time.Time{}
			d.abandon()
			return
		}
		d.aborted, d.at = true, d.at.Add(d.reserve/2)
		d.abort(inbox.ErrDraining)
	}
	wake.by(d.at)
}

// stuckGrace is how long a handler may take to return after its context was cancelled.
const stuckGrace = 5 * time.Second

// overruns finds running jobs whose handlers ignore cancellation.
type overruns struct {
	cfg    *settings
	meters *instruments
	next   time.Time // the time of the next check; zero: nothing runs
	stuck  int
}

func (o *overruns) begin(j *job) {
	j.limit = j.began.Add(o.cfg.limit(len(j.items)) + stuckGrace)
	if j.ledger != untracked {
		j.limit = j.limit.Add(2 * o.cfg.Timeout)
	}
	if o.cfg.Solo != nil {
		j.limit = j.limit.Add(soloPatience)
	}
	if o.next.IsZero() || j.limit.Before(o.next) {
		o.next = j.limit
	}
}

func (o *overruns) end(j *job) {
	if j.stuck {
		o.stuck--
	}
}

// stuckOnes returns the jobs that have become stuck.
func (o *overruns) stuckOnes(now time.Time, running []*job, wake *alarm) (stuck []*job) {
	if o.next.IsZero() || now.Before(o.next) {
		wake.by(o.next)
		return nil
	}
	o.next = time.Time{}
	for _, j := range running {
		switch {
		case j.stuck:
		case now.Before(j.limit):
			if o.next.IsZero() || j.limit.Before(o.next) {
				o.next = j.limit
			}
		default:
			j.stuck = true
			o.stuck++
			o.meters.stuck()
			o.cfg.Logger.Error("handler is stuck", slog.Any("message_id", j.items[0].m.ID), slog.String("name", j.items[0].m.Name),
				slog.Int("messages", len(j.items)), slog.Duration("for", j.limit.Sub(j.began)))
			stuck = append(stuck, j)
		}
	}
	wake.by(o.next)
	return stuck
}

// alarm is the loop's only timer. Every step that must act later asks it for a turn.
type alarm struct {
	now   time.Time // of the turn
	at    time.Time // the earliest requested time; zero: none
	timer *time.Timer
	armed time.Time // the time at which the timer fires; zero: not armed
}

func newAlarm() *alarm {
	a := &alarm{timer: time.NewTimer(time.Hour)}
	a.timer.Stop()
	return a
}

// reset clears the times of the last turn.
func (a *alarm) reset(now time.Time) { a.now, a.at = now, time.Time{} }

// by asks for a turn at a time. A time that is not in the future is ignored, because this turn acts on it.
func (a *alarm) by(at time.Time) {
	if at.After(a.now) && (a.at.IsZero() || at.Before(a.at)) {
		a.at = at
	}
}

// set arms the timer. A timer that fires too early costs one turn, so it is not moved to a later time.
func (a *alarm) set() <-chan time.Time {
	if !a.at.IsZero() && (a.armed.IsZero() || a.at.Before(a.armed)) {
		a.armed = a.at
		a.timer.Reset(a.at.Sub(a.now))
	}
	return a.timer.C
}

// rang records that the timer has fired.
func (a *alarm) rang() { a.armed = time.Time{} }
