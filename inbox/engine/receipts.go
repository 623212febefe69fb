package engine

import "time"

// ackPatience is how long an acknowledgement waits for others while handlers run: each call costs a
// packet. It is little beside the way to the broker.
const ackPatience = time.Millisecond

// receipts are what the broker is to be told of messages: that they are done, or given back. The
// loop alone uses them.
type receipts struct {
	cfg     *settings
	hand    *hand
	signals *signals
	next    *settlement // what has gathered
	since   time.Time   // when it began to; zero: not looked at yet
	spare   *settlement // nil: the acker has it
}

// ack ends a message that has taken effect, or is a leftover.
func (r *receipts) ack(it *item, leftover bool) {
	r.next.session = it.session
	r.next.acks = append(r.next.acks, it.d)
	if leftover {
		r.next.leftovers++
	}
	it.state = settling
	r.hand.gone(it)
}

// giveBack returns messages to their queue, uncounted.
func (r *receipts) giveBack(items ...*item) {
	for _, it := range items {
		if r.cfg.Ordered { // given back alone it would come after later ones
			r.hand.lost(it)
			continue
		}
		it.state = settling
		if it.session.over.Load() {
			r.signals.count(stale, "", 1)
		} else {
			r.next.session = it.session
			r.next.backs = append(r.next.backs, it.d)
		}
		r.hand.gone(it)
	}
}

// due reports whether the acker is to have what has gathered: a quarter of the window, or what has
// waited long enough, or for nothing. The acker must be done with that of before.
func (r *receipts) due(now time.Time) bool {
	if r.next.empty() || r.spare == nil {
		return false
	}
	if r.since.IsZero() {
		r.since = now
	}
	return len(r.next.backs) > 0 || 4*len(r.next.acks) >= r.cfg.Prefetch || now.Sub(r.since) >= ackPatience || r.short()
}

// outgoing returns what the acker is to have.
func (r *receipts) outgoing() *settlement {
	r.next.mayWait = !r.short()
	return r.next
}

// short reports whether the workers have too little to do next: the broker hands out no more for what
// it does not know to be done.
func (r *receipts) short() bool {
	queues := &r.hand.queues
	return len(queues.limits.jobs) == 0 || 2*(queues.single.n+queues.fresh.n) < r.cfg.Concurrency*r.cfg.Batch
}

// wake returns when due changes its mind without an event; zero: it does not.
func (r *receipts) wake(now time.Time) time.Time {
	if r.since.IsZero() {
		return r.since
	}
	return later(r.since.Add(ackPatience), now)
}

// handed notes that the acker has what has gathered.
func (r *receipts) handed() { r.next, r.spare, r.since = r.spare, nil, time.Time{} }

// settled takes back what the acker has done.
func (r *receipts) settled(s *settlement) {
	s.reset()
	r.spare = s
}

// drop forgets what has gathered: its session has ended.
func (r *receipts) drop() {
	r.signals.count(stale, "", len(r.next.acks)+len(r.next.backs))
	r.next.reset()
	r.since = time.Time{}
}

// empty reports whether nothing is left to tell.
func (r *receipts) empty() bool { return r.next.empty() && r.spare != nil }
