package engine

import (
	"log/slog"
	"slices"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/backoff"
	"github.com/holdfast-go/holdfast/internal/isolate"
)

const (
	// outageSize is how many suspects start a pause at once.
	outageSize = 16

	// controlPatience is how long a suspect waits for another message to start before it is tried again. A
	// busy broker may deliver nothing for a second. controlLimit is how long it waits for a started message
	// to succeed.
	controlPatience = 1500 * time.Millisecond
	controlLimit    = 5 * time.Second

	// suspectPause is how long a suspect is set aside while others succeed, spread by half.
	suspectPause = 2 * time.Second

	// maxKnown bounds the entries about suspects that other consumers have finished.
	maxKnown = 4096

	// maxSuspects bounds the suspects that are excluded from the next probe.
	maxSuspects = 256

	// probeWait is how long a probe waits for the first message of the queue, and probeGap for each further one.
	probeWait = time.Second
	probeGap  = 100 * time.Millisecond

	// probeRun is how long a probe waits for one of its messages to end before it tries more messages.
	probeRun = 2 * time.Second
)

// pauses are the waits before a paused consumer probes: 0.5 s growing to 2 s, spread by half. They are short,
// because a pause may last longer than its cause, and the messages of the last probe may themselves be at
// fault.
var pauses = backoff.Policy{Base: 500 * time.Millisecond, Max: 2 * time.Second, Jitter: 0.5, JitterAfterCap: true}

// gate controls whether messages may start.
type gate uint8

const (
	open    gate = iota
	shut         // none
	probing      // a few, to find out whether the server is reachable again
)

// outage decides who is at fault when messages fail because a server was unreachable. If it is the server, it
// pauses the consumer; otherwise it is the message. Such messages are suspects until other messages show
// which it is. It has no clock. Only the loop uses it.
//
//	open ──▶ shut          16 fresh suspects (or Prefetch), or messages started after one and none succeeded in 5 s
//	open ──▶ probing       nothing else has started: the suspects themselves are tried first ("early")
//	shut ──▶ probing       after the pause
//	probing ──▶ shut       a probe has failed, and none has succeeded
//	probing ──▶ open       a probe has succeeded, or nothing shows an outage
//	any ──▶ open           the session has ended: its messages are redelivered
type outage struct {
	cfg      *settings
	search   *isolate.Search[uuid.UUID]
	suspects []*item
	cause    error // the last failure that looked like an outage

	halted bool // paused by an operator, or not known yet: nothing starts, and the gate stays unchanged
	told   bool // it is known whether an operator has paused the consumer

	gate  gate
	n     int       // probes since the gate was open
	at    time.Time // shut: when the next probe begins; probing: how long it waits for messages, zero: not yet
	early bool      // probing before the first pause: nothing has shown an outage yet

	round    int // the probe's number
	most     int // messages of the probe
	begun    int
	finished int
	since    time.Time // when its last message began, or it grew
	aside    int       // messages that arrived and would show nothing
	down     bool      // one of its messages has failed
	inPlace  bool      // the suspects are the probe
}

func newOutage(cfg *settings) *outage {
	search := isolate.New[uuid.UUID](isolate.Singles)
	search.Strikes, search.Control, search.Most = 2, true, maxKnown
	return &outage{cfg: cfg, search: search, halted: cfg.pausable != nil}
}

// paused reports whether a server seems to be down.
func (o *outage) paused() bool { return o.gate != open && (!o.early || o.down) }

// room returns how many messages may start now. Probes are tried one by one. Left is how many MessageLimit
// allows.
func (o *outage) room(left int) int {
	switch {
	case o.halted || o.gate == shut:
		return 0
	case o.gate == probing:
		return min(o.most-o.begun, left, 1)
	}
	return left
}

// begin records that the messages of a job start.
func (o *outage) begin(j *job) {
	for _, it := range j.items {
		it.mark, it.probe = o.search.Mark(), 0
		if o.gate == probing {
			it.probe = o.round
			o.begun++
			o.since = j.began
		}
	}
}

// probeEnded records the end of a message that may be part of a probe. It reports whether that ends the
// pause.
func (o *outage) probeEnded(it *item, down, succeeded bool) (over bool) {
	if o.gate != probing || it.probe != o.round {
		return false
	}
	it.probe = 0
	o.finished++
	o.down = o.down || down
	return succeeded
}

// wasSuspect reports whether a message has failed as a suspect before. It runs in a call of its own.
func (o *outage) wasSuspect(it *item) bool { return o.search.Has(it.m.ID) }

// struck reports whether a message has failed as a suspect while others succeeded.
func (o *outage) struck(it *item) bool { return o.search.Struck(it.m.ID) }

// sets reports whether an arriving message is set aside. A struck message is useless in a probe, and many of
// them may be at the head of the queue.
func (o *outage) sets(it *item) (aside bool) {
	return o.gate == probing && !o.cfg.Ordered && o.struck(it)
}

// together records messages that failed in one call. Each must fail alone before it becomes a suspect.
func (o *outage) together(items []*item) {
	if len(items) == 1 { // the others of its batch succeeded
		o.search.Add(items[0].m.ID)
		return
	}
	ids := make([]uuid.UUID, len(items))
	for i, it := range items {
		ids[i] = it.m.ID
	}
	o.search.Failed(ids...)
}

// suspect keeps a message until other messages show who is at fault. It returns the suspect to remove if
// there are too many. Some queues would deliver that one first again if it was requeued.
func (o *outage) suspect(it *item, now time.Time) []action {
	if it.outcome != nil {
		o.search.Failed(it.m.ID)
		o.cause = it.outcome.failure.Err
	} else {
		o.aside++
	}
	it.since = now
	o.suspects = append(o.suspects, it)
	if o.cfg.Ordered || len(o.suspects) <= maxSuspects {
		return nil
	}
	oldest := o.suspects[0]
	o.suspects = o.suspects[1:]
	return o.spare(oldest)
}

// clear removes a message from the suspects because it failed for another reason.
func (o *outage) clear(it *item) { o.search.Clear(it.m.ID) }

// succeeded records that a message succeeded. That shows that the servers are reachable, so the suspects that
// failed before it started are themselves at fault. After the second time a suspect is handled as a failure.
// After the first time it is only set aside for a moment.
func (o *outage) succeeded(it *item, now time.Time) (actions []action) {
	o.search.Clear(it.m.ID)
	if len(o.suspects) == 0 {
		return nil
	}
	guilty, spared := o.search.Controlled(it.mark)
	for _, other := range o.take(guilty) {
		if other.outcome == nil { // a copy of it has failed, and this one was set aside
			actions = append(actions, o.spare(other)...)
			continue
		}
		other.outcome = guiltyOutcome(o.cfg, other.m, other.outcome, now)
		logFailure(o.cfg, other.m, other.outcome)
		actions = append(actions, action{other, move, orderOf(o.cfg, other.m, other.outcome)})
	}
	return append(actions, o.spare(o.take(spared)...)...)
}

// spare moves suspects behind the other messages and does not count a failure.
func (o *outage) spare(items ...*item) (actions []action) {
	for _, it := range items {
		pause := suspectPause/2 + time.Duration(o.cfg.Rand()*float64(suspectPause))
		actions = append(actions, action{it, move, away(it.m, pause)})
	}
	return actions
}

// take removes the suspects with the given ids.
func (o *outage) take(ids []uuid.UUID) []*item {
	if len(ids) == 0 {
		return nil
	}
	return o.remove(func(it *item) bool { return slices.Contains(ids, it.m.ID) })
}

// remove removes and returns suspects.
func (o *outage) remove(which func(*item) bool) (removed []*item) {
	o.suspects = slices.DeleteFunc(o.suspects, func(it *item) bool {
		if which(it) {
			removed = append(removed, it)
			return true
		}
		return false
	})
	return removed
}

// release returns all suspects without a decision about them.
func (o *outage) release() (all []*item) {
	o.search.Outage()
	all, o.suspects = o.suspects, nil
	return all
}

// rerun runs all suspects again.
func (o *outage) rerun() (actions []action) {
	for _, it := range o.release() {
		it.reset()
		actions = append(actions, action{it: it, do: rerun})
	}
	return actions
}

// step checks the suspects, and advances a pause. Newest is the start of the youngest running job; left is
// how many messages MessageLimit allows.
func (o *outage) step(now, newest time.Time, left int, wake *alarm) []action {
	switch {
	case o.halted:
		return nil
	case o.gate == open:
		return o.weigh(now, newest, left, wake)
	case o.gate == probing:
		return o.probed(now, wake)
	case now.Before(o.at):
		wake.by(o.at)
		return nil
	}
	o.probe(1<<min(o.n, 10), left)
	if o.cfg.Ordered { // the messages in flight are the probe
		o.awaitMessages(now, probeGap)
	}
	return o.probed(now, wake)
}

// weigh checks the suspects while there is no pause.
func (o *outage) weigh(now, newest time.Time, left int, wake *alarm) []action {
	if len(o.suspects) == 0 {
		return nil
	}
	isOutage, inDoubt := o.verdict(now, newest, wake)
	switch {
	case isOutage:
		o.pause(now, wake)
		return nil
	case inDoubt: // nothing has started for a while, perhaps because the broker is silent: the suspects are the probe
		o.probe(outageSize, left)
		o.early, o.inPlace = true, true
		o.awaitMessages(now, probeGap)
		wake.by(o.at)
		return o.rerun()
	}
	return o.spare(o.remove(func(it *item) bool { return o.struck(it) && !now.Before(patience(it, newest)) })...)
}

// verdict reports whether the suspects show an outage, or are inconclusive. Struck suspects are ignored: they
// have failed in this way before while others succeeded.
func (o *outage) verdict(now, newest time.Time, wake *alarm) (isOutage, inDoubt bool) {
	fresh := 0
	for _, it := range o.suspects {
		until := patience(it, newest)
		wake.by(until)
		if o.struck(it) {
			continue
		}
		fresh++
		switch {
		case now.Before(until):
		case newest.Before(it.since):
			inDoubt = true
		default:
			isOutage = true
		}
	}
	return isOutage || fresh >= min(outageSize, o.cfg.Prefetch), inDoubt
}

// patience returns the end of a suspect's wait for other messages.
func patience(it *item, newest time.Time) time.Time {
	if !newest.Before(it.since) { // a message that starts at the same instant counts as started later
		return it.since.Add(controlLimit)
	}
	return it.since.Add(controlPatience)
}

// pause starts a pause, or the next pause after a probe.
func (o *outage) pause(now time.Time, wake *alarm) {
	if o.gate == open || o.early {
		o.n = 0
	} else {
		o.n++
	}
	delay := pauses.Delay(o.n, o.cfg.Rand())
	o.gate, o.at, o.early = shut, now.Add(delay), false
	wake.by(o.at)
	o.cfg.Logger.Warn("paused: dependency unavailable", slog.Duration("again_in", delay), slog.Any("error", o.cause))
}

// probe starts a probe of at most most messages.
func (o *outage) probe(most, left int) {
	o.gate, o.at, o.round = probing, time.Time{}, o.round+1
	o.most = max(min(most, o.cfg.Concurrency, left), 1)
	o.begun, o.finished, o.aside, o.down, o.inPlace = 0, 0, 0, false, false
}

// window returns how many messages a probe may receive. It grows with the number of messages set aside,
// because those may be all that is at the head of the queue.
func (o *outage) window() int {
	n := min(o.most+4*o.aside, max(o.most, maxSuspects))
	if most := o.cfg.traits.MaxWindow; most > 0 {
		n = min(n, most)
	}
	return n
}

// awaitMessages records that a probe's messages may arrive, or have arrived.
func (o *outage) awaitMessages(now time.Time, patience time.Duration) {
	if o.gate == probing {
		o.at = now.Add(patience)
	}
}

// probed checks a probe.
func (o *outage) probed(now time.Time, wake *alarm) []action {
	waited := !o.at.IsZero() && !now.Before(o.at)
	switch {
	case o.finished < o.begun || o.begun < o.most && !waited:
		o.grow(now, wake)
		return nil
	case o.begun > 0 && o.down:
		o.pause(now, wake)
		return nil
	case o.begun == 0 && !o.inPlace && len(o.suspects) > 0: // no other messages: the suspects are the probe
		o.inPlace = true
		o.awaitMessages(now, probeGap)
		wake.by(o.at)
		return o.rerun()
	}
	return o.reopen()
}

// grow doubles the messages of a probe if all of them run for long. Otherwise slow handlers would delay the
// result.
func (o *outage) grow(now time.Time, wake *alarm) {
	if o.finished == 0 && o.begun == o.most && o.most < o.cfg.Concurrency {
		if at := o.since.Add(probeRun); now.Before(at) {
			wake.by(at)
			return
		}
		o.most, o.since = min(2*o.most, o.cfg.Concurrency), now
	}
	if o.finished == o.begun {
		wake.by(o.at)
	}
}

// reopen ends a pause. Struck suspects are set aside for a moment: rerun at once they would look like a new
// outage.
func (o *outage) reopen() []action {
	o.gate, o.at, o.early = open, time.Time{}, false
	actions := o.spare(o.remove(o.struck)...)
	return append(actions, o.rerun()...)
}

// reset ends a pause because the session has ended, and forgets the suspects.
func (o *outage) reset() {
	o.release()
	o.gate, o.at, o.early = open, time.Time{}, false
}

// forget removes requeued messages from the suspects.
func (o *outage) forget(items []*item) {
	o.remove(func(it *item) bool { return slices.Contains(items, it) })
}
