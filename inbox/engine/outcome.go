package engine

import (
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/internal/base"
	"github.com/holdfast-go/holdfast/internal/backoff"
)

// outcome is the result of a message's run that did not succeed.
type outcome struct {
	kind     outcomeKind
	failure  driver.Failure
	decision driver.Decision
	at       time.Time
}

type outcomeKind uint8

const (
	failed       outcomeKind = iota + 1
	outdated                 // it did not run: its retry is already stored
	mustRunAlone             // it did not run: it may have ended the process
)

// unavailable reports whether the run failed because a server was unreachable. A nil outcome is a success.
func (o *outcome) unavailable() bool { return o != nil && o.kind == failed && o.failure.Unavailable }

// action is the loop's next step for an item; see loop.do.
type action struct {
	it    *item
	do    verb
	order order // of move
}

type verb uint8

const (
	ack     verb = iota + 1 // it took effect
	skip                    // it is outdated, and acknowledged too
	requeue                 // it goes back to the broker's queue, uncounted
	rerun                   // it runs again immediately
	suspect                 // other messages show who is at fault
	move                    // it is moved as its order describes
)

// order is the destination of a message.
type order struct {
	target  driver.Target // 0: nowhere
	delay   time.Duration
	as      settledAs
	next    driver.Progress
	counted bool // the copy is the next attempt
	ran     bool // the message was processed, so the ledger may have its run
}

// toStop is the target of a dead letter that stops its key, in addition to the targets of the source.
const toStop driver.Target = -1

// returnPause is the delay of a message that the processor returned without a reason.
const returnPause = time.Second

// judge makes an outcome of an error. A worker calls it, because the error's methods are the user's code.
func judge(cfg *settings, m *inbox.Message, err error, now time.Time) *outcome {
	f := driver.Classify(err)
	d := driver.Decision{Action: f.Action}
	if !f.Unavailable {
		d = driver.Next(cfg.Retry, m, f, now, cfg.Rand())
	}
	return &outcome{kind: failed, failure: f, decision: d, at: now}
}

// guiltyOutcome is the outcome of a message that is itself at fault although its failure looked like an
// outage.
func guiltyOutcome(cfg *settings, m *inbox.Message, o *outcome, now time.Time) *outcome {
	f := o.failure
	f.Action, f.Counted, f.Unavailable = driver.ActionRetry, true, false
	return &outcome{kind: failed, failure: f, decision: driver.Next(cfg.Retry, m, f, now, cfg.Rand()), at: now}
}

// orderOf returns the destination of a failed message. A message returned by the processor goes behind the
// others: requeued at once it would run in a hot loop.
func orderOf(cfg *settings, m *inbox.Message, o *outcome) order {
	switch o.decision.Action {
	case driver.ActionRetry:
		next := driver.Progressed(m, o.failure, o.decision, cfg.Name, o.at)
		to := order{target: driver.ToLater, delay: o.decision.Delay, as: putOff, next: next, ran: true}
		if o.decision.Counted {
			to.as, to.counted = retried, true
		}
		return to
	case driver.ActionDead:
		return order{target: driver.ToDead, as: dead, ran: true}
	}
	return away(m, returnPause)
}

// away returns an order to redeliver a message later, uncounted.
func away(m *inbox.Message, delay time.Duration) order {
	next := driver.Progress{Attempt: max(m.Attempt, 1), Recovered: m.Recovered, FirstFailedAt: m.FirstFailedAt, History: m.History}
	return order{target: driver.ToLater, delay: delay, as: displaced, next: next}
}

// advance returns the next attempt of a message that waits in this process.
func advance(m *inbox.Message, next driver.Progress) *inbox.Message {
	later := *m
	later.Attempt, later.Recovered, later.FirstFailedAt, later.History = next.Attempt, next.Recovered, next.FirstFailedAt, next.History
	return &later
}

func logFailure(cfg *settings, m *inbox.Message, o *outcome) {
	if o.failure.Err == inbox.ErrDraining { //nolint:errorlint // not wrapped, so the message was not processed
		return
	}
	attrs := []any{
		"message_id", m.ID, "name", m.Name, "attempt", m.Attempt,
		"class", o.failure.Class, "action", o.decision.Action.String(), "error", o.failure.Err,
	}
	if o.decision.Action == driver.ActionRetry {
		attrs = append(attrs, "delay", o.decision.Delay)
	}
	if panicked, ok := errors.AsType[*base.Panic](o.failure.Err); ok {
		attrs = append(attrs, slog.String("stack", string(panicked.Stack)))
	}
	cfg.Logger.Warn("message not processed", attrs...)
}

// conclude decides about the messages of a finished job.
func (l *loop) conclude(j *job, now time.Time) {
	l.inflight.queues.ended(j, now)
	var together []*item
	over := false
	for i, it := range j.items {
		it.m, it.outcome = j.msgs[i], nil
		if j.outcomes != nil {
			it.outcome = j.outcomes[i]
		}
		down := it.outcome.unavailable()
		over = l.outage.probeEnded(it, down, it.outcome == nil) || over
		switch {
		case it.outcome == nil:
			l.succeeded(it, now)
		case it.state == orphaned || it.session.over.Load():
			l.redelivered(it)
		case down && len(j.items) > 1:
			together = append(together, it)
		default:
			l.do(l.decide(it, now), now)
		}
	}
	if len(together) > 0 {
		l.separate(together)
	}
	l.inflight.queues.reuse(j)
	if over {
		l.all(l.outage.reopen(), now)
	}
}

// succeeded ends a message that took effect, and decides about the suspects.
func (l *loop) succeeded(it *item, now time.Time) {
	suspects := l.outage.succeeded(it, now)
	if it.session.over.Load() {
		l.requeue(it)
	} else {
		l.do(action{it: it, do: ack}, now)
	}
	l.all(suspects, now)
}

// redelivered ends a failed message whose session has ended. If ordered, it continues with its next attempt
// when the broker redelivers it.
func (l *loop) redelivered(it *item) {
	if o := it.outcome; l.cfg.Ordered && o.kind == failed && o.decision.Action == driver.ActionRetry {
		to := orderOf(l.cfg, it.m, o)
		it.m, it.due = advance(it.m, to.next), o.at.Add(to.delay)
	}
	l.requeue(it)
}

// separate reruns the messages of a batch one by one after it failed because a server was unreachable: one of
// the messages may be the cause.
func (l *loop) separate(items []*item) {
	l.outage.together(items)
	for _, it := range items {
		if l.drain.on {
			l.requeue(it)
			continue
		}
		it.mode = single
		l.inflight.ready(it)
	}
}

// decide returns the next step for a message that did not succeed.
func (l *loop) decide(it *item, now time.Time) action {
	switch o := it.outcome; {
	case o.kind == outdated:
		return action{it: it, do: skip}
	case l.drain.on && (o.kind == mustRunAlone || o.failure.Unavailable || o.decision.Action == driver.ActionReturn):
		return action{it: it, do: requeue}
	case o.kind == mustRunAlone:
		it.mode, it.ledger = alone, asked
		return action{it: it, do: rerun}
	case o.failure.Unavailable:
		return action{it: it, do: suspect}
	default:
		l.outage.clear(it)
		if errors.Is(o.failure.Err, driver.ErrRefused) { // its key is stopped, and too many messages wait
			l.refusal(l.cfg.destination(order{target: toStop}, ""), o.failure.Err, now)
		}
		return action{it, move, orderOf(l.cfg, it.m, o)}
	}
}

// all performs several actions.
func (l *loop) all(actions []action, now time.Time) {
	for _, a := range actions {
		l.do(a, now)
	}
}

// do performs an action. Every message ends its run here.
func (l *loop) do(a action, now time.Time) {
	it := a.it
	l.changed = true
	switch a.do {
	case ack, skip:
		l.acks.ack(it, a.do == skip)
		l.inflight.gone(it)
	case requeue:
		l.requeue(it)
	case rerun:
		l.inflight.ready(it)
	case suspect:
		if it.state != suspected {
			l.inflight.to(it, suspected)
		}
		if l.outage.struck(it) {
			l.inflight.waiting.add(it)
		}
		l.all(l.outage.suspect(it, now), now)
	case move:
		l.move(it, a.order, now)
	}
}

// requeue returns a message to the broker's queue, uncounted. Ordered messages are requeued together when
// their session ends: one alone would be redelivered after later ones.
func (l *loop) requeue(it *item) {
	switch {
	case l.cfg.Ordered:
		l.inflight.lose(it)
		return
	case it.session.over.Load():
		l.meters.count(stale, "", 1)
	default:
		l.acks.requeue(it)
	}
	l.inflight.gone(it)
}

// lingerMost is the longest time for which a postponed message waits in this process.
const lingerMost = 5 * time.Second

// move moves a message to another queue, or delays it in this process. An ordered retry is delayed here and
// its key waits; in another queue, the next message would overtake it. A message postponed for a short time
// is also delayed here, because at the broker it would lose its place.
func (l *loop) move(it *item, o order, now time.Time) {
	l.changed = true
	if o.target == driver.ToDead && l.cfg.parker != nil && it.key != "" && it.m.Validate() == nil {
		o.target = toStop
	}
	it.order = o
	switch {
	case l.cfg.Ordered && o.target == driver.ToLater && l.drain.on:
		l.requeue(it)
	case l.cfg.Ordered && o.target == driver.ToLater:
		it.order.target, it.due = 0, now.Add(o.delay)
		if o.counted && l.cfg.ledger != nil { // the mover records the attempt first
			l.out(it)
			return
		}
		l.retryHere(it)
	case o.as == putOff && o.ran && o.delay <= lingerMost && !l.drain.on && l.inflight.waiting.n < maxHeld(l.cfg):
		l.meters.count(o.as, it.class(), 1)
		it.reset()
		l.inflight.delay(it, now.Add(o.delay))
	default:
		l.out(it)
	}
}

// retryHere delays an ordered message to its next attempt.
func (l *loop) retryHere(it *item) {
	l.meters.count(it.order.as, it.class(), 1)
	if it.order.counted {
		it.m = advance(it.m, it.order.next)
		it.ledger = untracked
		if l.cfg.tracks(it.m) {
			it.ledger = tracked
		}
	}
	it.reset()
	it.mode = single
	l.inflight.delay(it, it.due)
}

// out gives a message to the mover.
func (l *loop) out(it *item) {
	l.inflight.to(it, outbound)
	l.outbound.pending = append(l.outbound.pending, it)
}

// moved handles the results of a removal.
func (l *loop) moved(r *removal, now time.Time) {
	l.outbound.finished(r)
	unavailable := false
	for i, it := range r.items {
		err := r.errs[i]
		switch {
		case err == nil && it.order.target != 0:
			l.outbound.tries = 0
			l.outbound.refusals.clear(l.cfg.destination(it.order, it.class()))
			l.inflight.gone(it)
		case it.session.over.Load(), errors.Is(err, driver.ErrStale): // the broker redelivers it
			if it.order.target == 0 {
				it.m = advance(it.m, it.order.next)
			}
			l.inflight.lose(it)
		case err == nil:
			l.retryHere(it)
		case errors.Is(err, driver.ErrUnavailable):
			unavailable = true
			l.moveAgain(it, now)
		default:
			l.refused(it, err, now)
		}
	}
	switch {
	case unavailable && l.drain.on: // no time for another try
		for _, it := range l.outbound.drop() {
			l.requeue(it)
		}
	case unavailable:
		l.outbound.at = now.Add(moveRetries.Delay(l.outbound.tries, l.cfg.Rand()))
		l.outbound.tries++
	}
}

// moveAgain keeps a message outbound while nothing can be moved. If it was requeued, its handler would run
// again needlessly. But the broker must not take it back.
func (l *loop) moveAgain(it *item, now time.Time) {
	hold := l.cfg.traits.Hold
	if l.drain.on || hold > 0 && !l.cfg.Ordered && now.Sub(it.arrived) > hold/2 {
		l.requeue(it)
		return
	}
	l.inflight.waiting.add(it)
	l.outbound.pending = append(l.outbound.pending, it)
}

// refused handles a message that its destination rejected. It goes behind the others. If it was requeued,
// some queues would deliver it first again, and a window full of such messages would block the queue.
func (l *loop) refused(it *item, err error, now time.Time) {
	l.refusal(l.cfg.destination(it.order, it.class()), err, now)
	pause := l.outbound.refusals.pause(now)
	switch {
	case l.cfg.Ordered && !l.drain.on: // the key waits
		l.inflight.delay(it, now.Add(pause))
	case it.order.target == driver.ToDead && !l.cfg.Ordered:
		it.order = away(it.m, pause)
		l.outbound.pending = append(l.outbound.pending, it)
	case it.order.target == driver.ToLater && !l.drain.on:
		it.order = away(it.m, 0)
		it.order.target = driver.ToTail
		l.inflight.delay(it, now.Add(min(pause, tailPause)))
	default:
		l.requeue(it)
	}
}

// refusal logs that a destination rejects messages, and records it for Ready.
func (l *loop) refusal(destination string, err error, now time.Time) {
	if !l.outbound.refusals.note(destination, err, now) {
		return
	}
	instead := "moved behind the others"
	if l.cfg.Ordered {
		instead = "their keys wait"
	}
	l.cfg.Logger.Error("could not move message: destination rejected it",
		slog.String("to", destination), slog.String("instead", instead), slog.Any("error", err))
}

// ackPatience is how long an acknowledgement waits for others while handlers run, because each call costs a
// packet. It is short compared with the round trip to the broker.
const ackPatience = time.Millisecond

// acks gathers deliveries to acknowledge and to requeue for the acker. The loop alone uses it.
type acks struct {
	cfg   *settings
	next  *settlement // being filled
	since time.Time   // when next was started; zero: not checked yet
	spare *settlement // nil: the acker has it
}

func (a *acks) ack(it *item, outdated bool) {
	a.next.session = it.session
	a.next.acks = append(a.next.acks, it.d)
	if outdated {
		a.next.outdated++
	}
}

func (a *acks) requeue(it *item) {
	a.next.session = it.session
	a.next.backs = append(a.next.backs, it.d)
}

// due reports whether to give the gathered deliveries to the acker: something must be requeued, a quarter of
// the window is ready, the oldest ack has waited ackPatience, or the workers are idle. The acker takes one
// settlement at a time.
func (a *acks) due(now time.Time, idle bool, wake *alarm) bool {
	if a.next.empty() || a.spare == nil {
		return false
	}
	if a.since.IsZero() {
		a.since = now
	}
	a.next.mayWait = !idle // the broker delivers nothing more until it receives the acks
	if idle || len(a.next.backs) > 0 || 4*len(a.next.acks) >= a.cfg.Prefetch || now.Sub(a.since) >= ackPatience {
		return true
	}
	wake.by(a.since.Add(ackPatience))
	return false
}

// taken records that the acker has the gathered deliveries.
func (a *acks) taken() { a.next, a.spare, a.since = a.spare, nil, time.Time{} }

// settled takes back a settlement from the acker.
func (a *acks) settled(s *settlement) {
	s.reset()
	a.spare = s
}

// drop discards the gathered deliveries, because their session has ended, and returns their number.
func (a *acks) drop() int {
	n := len(a.next.acks) + len(a.next.backs)
	a.next.reset()
	a.since = time.Time{}
	return n
}

// empty reports whether nothing is left to settle.
func (a *acks) empty() bool { return a.next.empty() && a.spare != nil }

const (
	// tailPause bounds how long a message waits in this process if even the retry queue rejects it.
	tailPause = 5 * time.Second

	// slowMove is how long a removal may take before its messages count as waiting.
	slowMove = time.Second

	// maxRemovals bounds the removals under way: a message need not wait for the confirms of others.
	maxRemovals = 4
)

// moveRetries are the waits between attempts to move messages while none can be moved: 0.25 s growing to 5 s.
var moveRetries = backoff.Policy{Base: 250 * time.Millisecond, Max: 5 * time.Second}

// outgoing has the messages to move. Only the loop uses it.
type outgoing struct {
	cfg      *settings
	pending  []*item
	under    []*removal // with the mover, oldest first
	tries    int        // failed removals since the last success
	at       time.Time  // the earliest start of the next removal
	refusals refusals
}

// batch returns the next messages to move, of one session, or nil.
func (g *outgoing) batch(now time.Time, wake *alarm) *removal {
	if len(g.pending) == 0 || len(g.under) == removals(g.cfg) {
		return nil
	}
	if now.Before(g.at) {
		wake.by(g.at)
		return nil
	}
	n := min(len(g.pending), maxMoves)
	return &removal{session: g.pending[0].session, items: g.pending[:n:n]}
}

// removals is how many removals may be under way: one for ordered consumers.
func removals(cfg *settings) int {
	if cfg.Ordered {
		return 1
	}
	return maxRemovals
}

// taken records that the mover has a removal.
func (g *outgoing) taken(r *removal, now time.Time) {
	r.began = now
	g.pending, g.under = g.pending[len(r.items):], append(g.under, r)
}

func (g *outgoing) finished(r *removal) {
	g.under = slices.DeleteFunc(g.under, func(other *removal) bool { return other == r })
}

// slow returns the messages that count as waiting because moving them takes long. A missing confirm must not
// fill the window.
func (g *outgoing) slow(now time.Time, wake *alarm) (items []*item) {
	waits := g.tries > 0
	for _, r := range g.under {
		if at := r.began.Add(slowMove); now.Before(at) {
			wake.by(at)
			break // the later ones are younger
		}
		waits = true
		items = append(items, r.items...)
	}
	if waits {
		items = append(items, g.pending...)
	}
	return items
}

// drop returns the messages that the mover does not have, because their session has ended.
func (g *outgoing) drop() (items []*item) {
	items = g.pending
	g.pending, g.at, g.tries = nil, time.Time{}, 0
	return items
}

const (
	// refusalAge is how long a refusal is remembered. The messages concerned are redelivered earlier.
	refusalAge = maxSlot + 15*time.Second

	// refusalLog is the minimum time between two log lines about one destination.
	refusalLog = 30 * time.Second

	// slot is the distance in time between redelivered messages. While the destination rejects messages,
	// their handlers run without a result and share the workers with the others. maxSlot bounds that distance
	// for many messages.
	slot    = 50 * time.Millisecond
	maxSlot = time.Minute
)

// displacements are the pauses of one message while its destination rejects it: 1 s growing to 5 s.
var displacements = backoff.Policy{Base: time.Second, Max: 5 * time.Second}

// refusals has the destinations that reject messages because they are missing, full or forbidden.
type refusals struct {
	by     map[string]refusal
	inARow int
	next   time.Time // the first free slot
}

type refusal struct {
	err          error
	last, logged time.Time
}

// note records that a destination rejected a message, and reports whether to log it.
func (f *refusals) note(destination string, err error, now time.Time) (log bool) {
	if f.by == nil {
		f.by = map[string]refusal{}
	}
	logged := f.by[destination].logged
	if log = now.Sub(logged) > refusalLog; log {
		logged = now
	}
	f.by[destination] = refusal{err, now, logged}
	f.inARow++
	return log
}

// clear records that a destination accepts messages.
func (f *refusals) clear(destination string) {
	if len(f.by) == 0 {
		return
	}
	if _, known := f.by[destination]; known {
		delete(f.by, destination)
		f.inARow, f.next = 0, time.Time{}
	}
}

// pause returns the delay of the next message.
func (f *refusals) pause(now time.Time) time.Duration {
	if f.next.Before(now) {
		f.next = now
	}
	f.next = f.next.Add(slot)
	return min(max(f.next.Sub(now), displacements.Delay(f.inARow-1, 0)), maxSlot)
}

// latest returns the last destination that rejected a message, empty for none, and how long that counts.
func (f *refusals) latest() (destination string, until time.Time, err error) {
	if len(f.by) == 0 {
		return "", time.Time{}, nil
	}
	for name, refused := range f.by {
		if refused.last.After(until) {
			destination, until, err = name, refused.last, refused.err
		}
	}
	return destination, until.Add(refusalAge), err
}
