package engine

import (
	"container/heap"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/ids"
)

// hand is what this process has received and not settled. It decides what is begun next, and knows
// neither clock nor goroutine: the loop alone uses it.
type hand struct {
	cfg     *settings
	all     all
	keys    keys
	queues  queues
	timed   timed // held until a time
	crowd   crowd
	checkAt time.Time // when outstayed looks; zero: never
	broken  bool      // ordered: one is no longer the session's, which has not ended as far as is known

	orphans map[twin]*item // that run although their session has ended
	memory  map[twin]note  // of ordered retries whose session has ended
}

// note is how far an ordered message had got.
type note struct {
	m   *inbox.Message
	due time.Time
}

func newHand(cfg *settings) *hand {
	h := &hand{cfg: cfg, keys: keys{}, orphans: map[twin]*item{}, memory: map[twin]note{}}
	h.queues = queues{cfg: cfg, limits: newLimits(cfg, &h.crowd)}
	return h
}

// add takes what has arrived. A copy of what still runs for an ended session takes its place: the
// result of that run settles it.
func (h *hand) add(it *item, now time.Time) {
	it.arrived, it.epoch, it.index = now, h.crowd.epoch, -1
	if len(h.orphans) > 0 {
		if old := h.orphans[it.twin()]; old != nil {
			delete(h.orphans, it.twin())
			h.all.remove(old)
			old.d, old.session, old.arrived, old.epoch, old.orphan = it.d, it.session, now, h.crowd.epoch, false
			h.all.add(old)
			return
		}
	}
	h.all.add(it)
	it.tracked = h.cfg.tracks(it.m)
	it.single = it.single || it.tracked || it.m.Attempt > 1
	if it.key != "" && !h.keys.enter(it) {
		it.state = queued
		return
	}
	h.enter(it)
}

// enter has an item be begun, or wait where it had got further on a session before, or until a pause is over.
func (h *hand) enter(it *item) {
	if it.aside {
		it.state = held
		return
	}
	if len(h.memory) > 0 {
		if known, ok := h.memory[it.twin()]; ok {
			delete(h.memory, it.twin())
			it.m, it.single = known.m, true
			h.hold(it, known.due)
			return
		}
	}
	h.queues.ready(it)
}

// hold has an item wait for a time and then be ready.
func (h *hand) hold(it *item, due time.Time) {
	it.state, it.due = held, due
	heap.Push(&h.timed, it)
}

// due makes those ready, or returns them for the mover, whose time has come.
func (h *hand) due(now time.Time) (moves []*item) {
	for len(h.timed) > 0 && !h.timed[0].due.After(now) {
		it := heap.Pop(&h.timed).(*item)
		if it.order.target != 0 {
			moves = append(moves, it)
			continue
		}
		h.crowd.remove(it)
		h.queues.ready(it)
	}
	return moves
}

// gone ends an item: the next of its key is ready.
func (h *hand) gone(it *item) {
	h.crowd.remove(it)
	h.all.remove(it)
	if it.orphan && h.orphans[it.twin()] == it {
		delete(h.orphans, it.twin())
	}
	if it.key == "" {
		return
	}
	if next := h.keys.leave(it); next != nil {
		h.enter(next)
	}
}

// drop forgets what an ended session has delivered, since it comes again. What runs goes on, for
// its twin; how far ordered retries have got is kept for theirs.
func (h *hand) drop(now time.Time) (dropped int) {
	var next *item
	for it := h.all.head; it != nil; it = next {
		next = it.next
		switch it.state {
		case running, moving:
			it.arrived = now                                                    // as far as renewAt is concerned: the broker has taken it back
			if it.state == running && !it.orphan && ids.Check(it.m.ID) == nil { // without an id nothing tells its twin
				it.orphan = true
				h.orphans[it.twin()] = it
			}
		case ready, queued, held:
			if it.m != it.d.Message() {
				h.remember(it)
			}
			h.crowd.remove(it)
			h.all.remove(it)
			dropped++
		}
	}
	h.queues.empty()
	h.timed, h.broken = nil, false
	h.keys.clear(func(it *item) bool { return it.state >= running && it.state != held })
	h.crowd.renew()
	return dropped
}

// remember keeps how far a message has got that comes again on another session. The bound is for
// those that another process gets.
func (h *hand) remember(it *item) {
	if len(h.memory) >= 2*h.cfg.Prefetch {
		clear(h.memory)
	}
	h.memory[it.twin()] = note{it.m, it.due}
}

// lost ends an item that comes again. An ordered one keeps its place until the loop knows of the end
// of its session, so that none of its key goes before it.
func (h *hand) lost(it *item) {
	if h.cfg.Ordered && !it.session.ended {
		it.state = held
		h.broken = h.broken || !it.session.over.Load()
		return
	}
	if it.m != it.d.Message() {
		h.remember(it)
	}
	h.gone(it)
}

// notBegun takes out what may be given back to the broker: what is ready or waits behind others,
// and what waits for something else if that too is wanted.
func (h *hand) notBegun(heldToo bool) (back []*item) {
	for it := h.all.head; it != nil; it = it.next {
		if it.state == ready || it.state == queued || it.state == held && heldToo {
			it.state = settling
			back = append(back, it)
		}
	}
	h.queues.empty()
	if heldToo {
		h.timed = nil
	}
	return back
}

// outstayed takes out those that have waited in hand for so long that the broker would soon take
// them back: for a time, for a verdict, or for their turn. It looks now and then. Ordered ones are given back together: see control.steerOrdered.
func (h *hand) outstayed(now time.Time) (back []*item) {
	hold := h.cfg.traits.Hold
	if hold == 0 || h.cfg.Ordered || now.Before(h.checkAt) {
		return nil
	}
	h.checkAt = now.Add(hold / 16)
	since := now.Add(-hold / 2)
	var left []*item // that may be begun
	for it := h.all.head; it != nil; it = it.next {
		old := it.arrived.Before(since)
		switch {
		case old && it.state == held:
			if it.index >= 0 {
				heap.Remove(&h.timed, it.index)
			}
			back = append(back, it)
		case old && (it.state == ready || it.state == queued):
			back = append(back, it)
		case it.state == ready || it.state == queued:
			left = append(left, it)
		}
	}
	if len(back) == 0 {
		return nil
	}
	h.queues.empty()
	for _, it := range left {
		h.queues.ready(it)
	}
	return back
}

// wake returns when something is due that no event tells of; zero: nothing is.
func (h *hand) wake() time.Time {
	if len(h.timed) == 0 {
		return h.checkAt
	}
	return earlier(h.timed[0].due, h.checkAt)
}

// renewAt is when an ordered session is to begin anew, before the broker takes its messages back;
// zero: never.
func (h *hand) renewAt() time.Time {
	if h.cfg.traits.Hold == 0 || !h.cfg.Ordered || h.all.head == nil {
		return time.Time{}
	}
	return h.all.head.arrived.Add(h.cfg.traits.Hold / 2)
}

// earlier returns the earlier of two times, of which zero is none.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// later returns a time if it is not over, and else zero.
func later(at, now time.Time) time.Time {
	if !at.After(now) {
		return time.Time{}
	}
	return at
}

// crowd counts the items that wait without a worker: they hold a place in the window.
type crowd struct {
	n, bytes int
	epoch    int // of the window
	now      int // of those, in this epoch
}

func (c *crowd) add(it *item) {
	if it.waiting {
		return
	}
	it.waiting = true
	c.n++
	c.bytes += len(it.m.Body)
	if it.epoch == c.epoch {
		c.now++
	}
}

func (c *crowd) remove(it *item) {
	if !it.waiting {
		return
	}
	it.waiting = false
	c.n--
	c.bytes -= len(it.m.Body)
	if it.epoch == c.epoch {
		c.now--
	}
}

// renew begins a window of its own: what is in hand does not count in it.
func (c *crowd) renew() { c.epoch, c.now = c.epoch+1, 0 }
