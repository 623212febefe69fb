package engine

import (
	"math"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
)

// queues are the items that may be begun, and the limits to that.
type queues struct {
	cfg    *settings
	limits limits

	alone  fifo // one after the other, with nothing beside it
	single fifo // one by one
	fresh  fifo // together with others

	excess []*item // too many wait for their handlers: these go elsewhere
	handed int     // given to the processor in this run
	asking int     // of those, jobs that ask the ledger first: it may keep them from the processor
	free   []*job
}

// ready lets an item be begun.
func (q *queues) ready(it *item) {
	it.state = ready
	switch {
	case it.alone:
		q.alone.push(it)
	case it.single || q.cfg.Batch == 1:
		q.single.push(it)
	default:
		q.fresh.push(it)
	}
}

// next returns what is to be begun now, nil for nothing. Room is how many messages may begin.
func (q *queues) next(now time.Time, room int) *job {
	room = min(room, q.left())
	for room > 0 && q.limits.free() {
		if q.alone.n > 0 {
			if !q.limits.maySolo(now) {
				return nil
			}
			j := q.job(now)
			j.items = append(j.items, q.alone.pop())
			q.begin(j)
			q.limits.suspect, q.limits.openAt = j, now.Add(soloPatience)
			return j
		}
		if q.limits.shut(now) {
			return nil
		}
		from := q.older()
		if from == &q.fresh && !q.limits.worth(from, now) {
			from = &q.single
		}
		if from == nil || from.n == 0 {
			return nil
		}
		if j := q.form(from, room, now); j != nil {
			return j
		}
	}
	return nil
}

// older is the queue whose first item has arrived earlier.
func (q *queues) older() *fifo {
	switch {
	case q.single.n == 0 && q.fresh.n == 0:
		return nil
	case q.single.n == 0:
		return &q.fresh
	case q.fresh.n == 0 || !q.fresh.head.arrived.Before(q.single.head.arrived):
		return &q.single
	}
	return &q.fresh
}

// form makes a job of the first items of a queue. It is nil when the limits of their handlers keep
// all of them back.
func (q *queues) form(from *fifo, room int, now time.Time) *job {
	most := 1
	if from == &q.fresh {
		most = min(q.cfg.Batch, room)
	}
	j := q.job(now)
	for from.n > 0 && len(j.items) < most {
		it := from.pop()
		q.limits.note(it.m.Name, now)
		switch {
		case q.limits.admit(j, it):
			j.items = append(j.items, it)
		case q.limits.sendsAway(it, now):
			q.excess = append(q.excess, it)
		default:
			q.limits.block(it)
		}
	}
	if len(j.items) == 0 {
		q.free = append(q.free, j)
		return nil
	}
	q.begin(j)
	return j
}

// begin takes a slot for a job.
func (q *queues) begin(j *job) {
	q.handed += len(j.items)
	q.limits.begin(j)
	first := j.items[0]
	j.tracked, j.asked, j.alone = first.tracked, first.asked, first.alone
	if j.asks() {
		q.asking++
	}
	j.msgs = first.one[:0]
	if len(j.items) > 1 {
		j.msgs = make([]*inbox.Message, 0, len(j.items))
	}
	for _, it := range j.items {
		it.state, it.batched = running, len(j.items) > 1
		j.msgs = append(j.msgs, it.m)
	}
}

// job returns an empty job.
func (q *queues) job(now time.Time) *job {
	j := &job{}
	if n := len(q.free); n > 0 {
		j, q.free = q.free[n-1], q.free[:n-1]
	}
	j.began = now
	return j
}

// done takes back a job that is no longer needed.
func (q *queues) done(j *job) {
	clear(j.items)
	*j = job{items: j.items[:0], errs: j.errs[:0], names: j.names[:0]}
	q.free = append(q.free, j)
}

// ended takes a job back: its slot and its handlers' are free again.
func (q *queues) ended(j *job, now time.Time) {
	if j.asks() {
		q.asking--
		if j.fates != nil && j.fates[0] != nil && j.fates[0].kind != hasFailed {
			q.handed--
		}
	}
	for _, it := range q.limits.end(j, now) {
		q.ready(it)
	}
}

// used reports whether MessageLimit is used up.
func (q *queues) used() bool { return q.left() <= 0 && q.asking == 0 }

// left is how many messages MessageLimit allows.
func (q *queues) left() int {
	if q.cfg.MessageLimit > 0 {
		return q.cfg.MessageLimit - q.handed
	}
	return math.MaxInt
}

// empty forgets all queues of what is not begun.
func (q *queues) empty() {
	q.alone, q.single, q.fresh, q.excess = fifo{}, fifo{}, fifo{}, nil
	q.limits.empty()
}

// wake returns when something may begin that no event tells of; zero: nothing does.
func (q *queues) wake(now time.Time) time.Time {
	if !q.limits.free() {
		return time.Time{}
	}
	return later(q.limits.wake(q.alone.n > 0, &q.fresh), now)
}
