package engine

import (
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/backoff"
)

const (
	// inPlacePause bounds how long a message waits unsettled for which not even a place for retries
	// is left.
	inPlacePause = 5 * time.Second

	// attention is how long the mover may take before the others count as waiting.
	attention = time.Second

	// maxRemovals bounds how many calls of Move are under way: a message need not wait for the
	// confirms of others.
	maxRemovals = 4
)

// again are the waits before messages are moved again while nothing can be moved: 0.25 s growing to 5 s.
var again = backoff.Policy{Base: 250 * time.Millisecond, Max: 5 * time.Second}

// moves are the messages that go elsewhere, and what to do where that is refused. The loop alone uses
// them.
type moves struct {
	cfg      *settings
	hand     *hand
	receipts *receipts
	refusals refusals
	draining bool

	pending []*item
	under   []*removal // given to the mover, the oldest first
	tries   int        // in vain, since something was moved
	at      time.Time  // when the next ones may be moved
}

// send has a message go elsewhere. An ordered one that comes again stays in hand, since others would
// overtake it: its key waits.
func (v *moves) send(it *item, o order, now time.Time) {
	it.order, it.state = o, moving
	if o.target == driver.ToDead && v.cfg.parker != nil && it.key != "" && it.m.Validate() == nil {
		it.order.target = toStop
	}
	if v.cfg.Ordered && o.target == driver.ToLater {
		if v.draining {
			v.receipts.giveBack(it)
			return
		}
		it.order.target, it.due = 0, now.Add(o.delay)
		if !o.counted || v.cfg.ledger == nil {
			v.again(it)
			return
		}
	}
	if v.lingers(o) {
		v.linger(it, now)
		return
	}
	v.due(it)
}

// lingerMost is the longest time for which a message that is put off stays in hand.
const lingerMost = 5 * time.Second

// lingers reports whether a message waits in hand: it has not failed and comes again soon. On its way by the broker it
// would lose its place, and be received once more.
func (v *moves) lingers(o order) bool {
	return o.outcome == putOff && o.ran && o.delay <= lingerMost && !v.draining && v.hand.crowd.n < maxHeld(v.cfg)
}

// linger has a message wait in hand that is put off.
func (v *moves) linger(it *item, now time.Time) {
	v.receipts.signals.count(it.order.outcome, it.class(), 1)
	due := now.Add(it.order.delay)
	it.alone, it.asked, it.order, it.fate = false, false, order{}, nil
	v.hand.crowd.add(it)
	v.hand.hold(it, due)
}

// again has an ordered message wait in hand for its next attempt.
func (v *moves) again(it *item) {
	it.single, it.alone, it.asked = true, false, false
	v.receipts.signals.count(it.order.outcome, it.class(), 1)
	if it.order.counted {
		it.m = advance(it.m, it.order.next)
		it.tracked = v.cfg.tracks(it.m)
	}
	it.order, it.fate = order{}, nil
	v.hand.crowd.add(it)
	v.hand.hold(it, it.due)
}

// batch returns the next messages to be moved, of one session, or nil.
func (v *moves) batch(now time.Time) *removal {
	if len(v.pending) == 0 || len(v.under) == removals(v.cfg) || now.Before(v.at) {
		return nil
	}
	n := min(len(v.pending), maxMoves)
	return &removal{session: v.pending[0].session, items: v.pending[:n:n]}
}

// removals is how many calls may be under way: one for ordered consumers.
func removals(cfg *settings) int {
	if cfg.Ordered {
		return 1
	}
	return maxRemovals
}

// taken notes that the mover has a batch.
func (v *moves) taken(r *removal, now time.Time) {
	r.began = now
	v.pending, v.under = v.pending[len(r.items):], append(v.under, r)
}

// moved deals with what became of messages that were to go elsewhere.
func (v *moves) moved(r *removal, now time.Time) {
	v.under = slices.DeleteFunc(v.under, func(other *removal) bool { return other == r })
	inVain := false
	for i, it := range r.items {
		err := r.errs[i]
		switch {
		case err == nil && it.order.target != 0:
			v.tries = 0
			v.refusals.clear(v.cfg.place(it.order, it.class()))
			v.hand.gone(it)
		case it.session.over.Load(), errors.Is(err, driver.ErrStale): // it comes again
			v.lost(it)
		case err == nil:
			v.again(it)
		case errors.Is(err, driver.ErrUnavailable):
			inVain = true
			v.wait(it, now)
		default:
			v.refused(it, err, now)
		}
	}
	if inVain {
		v.at = now.Add(again.Delay(v.tries, v.cfg.Rand()))
		v.tries++
	}
}

// lost forgets a message that comes again, but how far it has got. Those of its key wait until it has.
func (v *moves) lost(it *item) {
	if it.order.target == 0 {
		it.m = advance(it.m, it.order.next)
	}
	v.hand.lost(it)
}

// wait has a message be moved later, while none can be moved. Its handler would have to run again
// for nothing; but the broker must not take it back.
func (v *moves) wait(it *item, now time.Time) {
	hold := v.cfg.traits.Hold
	if v.draining || hold > 0 && !v.cfg.Ordered && now.Sub(it.arrived) > hold/2 {
		v.receipts.giveBack(it)
		return
	}
	v.hand.crowd.add(it)
	v.pending = append(v.pending, it)
}

// refused deals with a message whose place does not take it: it goes behind the others. Given back
// to some queues it would come first again, and as many as fill the window would stop the queue.
func (v *moves) refused(it *item, err error, now time.Time) {
	v.noteRefusal(v.cfg.place(it.order, it.class()), err, now)
	pause := v.refusals.pause(now)
	switch {
	case v.cfg.Ordered && !v.draining: // the key waits
		v.hand.crowd.add(it)
		v.hand.hold(it, now.Add(pause))
	case it.order.target == driver.ToDead && !v.cfg.Ordered:
		v.send(it, away(it.m, pause), now)
	case it.order.target == driver.ToLater && !v.draining:
		it.order = away(it.m, 0)
		it.order.target = driver.ToTail
		v.hand.crowd.add(it)
		v.hand.hold(it, now.Add(min(pause, inPlacePause)))
	default:
		v.receipts.giveBack(it)
	}
}

// noteRefusal remembers for Ready that a place took no message.
func (v *moves) noteRefusal(place string, err error, now time.Time) {
	if v.refusals.note(place, err, now) {
		v.cfg.Logger.Error("a place refused a message", slog.String("to", place), slog.String("so", instead(v.cfg)), slog.Any("error", err))
	}
}

// instead says what becomes of messages that are refused.
func instead(cfg *settings) string {
	if cfg.Ordered {
		return "their keys wait"
	}
	return "they go behind the others"
}

// countWaiting counts the messages to be moved as waiting when that takes long, those that the mover
// has included: a confirm that does not come must not keep the others out of the window.
func (v *moves) countWaiting(now time.Time) {
	slow := v.tries > 0
	for _, r := range v.under {
		if now.Sub(r.began) < attention {
			break // the later ones are younger
		}
		slow = true
		for _, it := range r.items {
			v.hand.crowd.add(it)
		}
	}
	if !slow {
		return
	}
	for _, it := range v.pending {
		v.hand.crowd.add(it)
	}
}

// due has a message moved whose time has come.
func (v *moves) due(it *item) {
	it.state = moving
	v.pending = append(v.pending, it)
}

// drop forgets what is not under way: its session has ended.
func (v *moves) drop() {
	for _, it := range v.pending {
		it.state = held // so that the hand drops it, too
	}
	v.pending, v.at, v.tries = nil, time.Time{}, 0
}

// wake returns when something is due that no event tells of; zero: nothing is.
func (v *moves) wake(now time.Time) (at time.Time) {
	for _, r := range v.under {
		at = earlier(at, later(r.began.Add(attention), now))
	}
	if len(v.pending) > 0 && len(v.under) < removals(v.cfg) {
		at = earlier(at, later(v.at, now))
	}
	return at
}
