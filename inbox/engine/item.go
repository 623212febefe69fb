package engine

import (
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// state is where an item is. Only the loop changes it.
type state uint8

const (
	ready    state = iota + 1 // it may be begun
	queued                    // it waits behind others of its key, or of its handler
	running                   // a worker has it
	held                      // it waits in hand for a verdict or for a time
	moving                    // it goes elsewhere
	settling                  // it is acknowledged or given back
)

// item is a delivery in hand. The receiver makes it. Then it belongs to the loop, but that a worker
// reads the message of a running one and the mover all of a moving one.
type item struct {
	d       driver.Delivery
	m       *inbox.Message // as it is to be processed: of ordered retries the next attempt
	session *session
	key     string // of ordered consumption; empty: none
	arrived time.Time
	epoch   int // of the window that it counts in

	state   state
	single  bool // never in a batch with others
	tracked bool // its runs are noted in the ledger
	asked   bool // the ledger was, about this one
	alone   bool // it may have ended the process: nothing runs beside it
	batched bool // it ran together with others
	orphan  bool // its session has ended while it runs
	waiting bool // counted as waiting without a worker
	aside   bool // it is not to be a probe: it has failed while others went through

	probe int       // the number of the probe that it is; 0: of none
	began uint64    // the search's mark when it was begun
	since time.Time // when it failed for want of a server, as it seems
	fate  *fate     // what became of it; nil: it went through
	order order     // where it goes

	one   [1]*inbox.Message // the messages of a job of its own
	due   time.Time         // of a held one
	index int               // in the heap of those that wait for a time

	prev, next *item // in hand, by arrival
	link       *item // in its queue
}

// twin tells copies of one delivery: it comes again after its session was lost.
type twin struct {
	id               uuid.UUID
	replays, attempt int
}

// twin is by the message as it arrived: attempts in hand are not known to the broker.
func (it *item) twin() twin {
	m := it.d.Message()
	return twin{m.ID, m.Replays, m.Attempt}
}

// job is what a worker runs in one call of the processor. The loop makes it; until it is finished
// it belongs to the worker. Then the loop uses it again, but for the messages: a processor may have
// kept that slice.
type job struct {
	items []*item
	msgs  []*inbox.Message
	errs  []error
	fates []*fate // nil: it went through
	names []string

	tracked, asked, alone bool // of its only item

	began time.Time
	limit time.Time // after which it is stuck
	stuck bool
	index int // among those that run
}

// asks reports whether the worker asks the ledger before it has the message processed.
func (j *job) asks() bool { return j.tracked && !j.asked }

// fifo is a queue of items. An item is in one at most.
type fifo struct {
	head, tail *item
	n          int
}

func (f *fifo) push(it *item) {
	it.link = nil
	if f.tail == nil {
		f.head = it
	} else {
		f.tail.link = it
	}
	f.tail = it
	f.n++
}

func (f *fifo) pop() *item {
	it := f.head
	if it == nil {
		return nil
	}
	f.head = it.link
	if f.head == nil {
		f.tail = nil
	}
	it.link = nil
	f.n--
	return it
}

// all are the items in hand by their arrival.
type all struct {
	head, tail *item
	n          int
}

func (a *all) add(it *item) {
	it.prev, it.next = a.tail, nil
	if a.tail == nil {
		a.head = it
	} else {
		a.tail.next = it
	}
	a.tail = it
	a.n++
}

func (a *all) remove(it *item) {
	if it.prev == nil {
		a.head = it.next
	} else {
		it.prev.next = it.next
	}
	if it.next == nil {
		a.tail = it.prev
	} else {
		it.next.prev = it.prev
	}
	it.prev, it.next = nil, nil
	a.n--
}

// timed is a heap of held items by their due time. It implements heap.Interface.
type timed []*item

func (t timed) Len() int           { return len(t) }
func (t timed) Less(i, j int) bool { return t[i].due.Before(t[j].due) }
func (t timed) Swap(i, j int) {
	t[i], t[j] = t[j], t[i]
	t[i].index, t[j].index = i, j
}

// Push implements heap.Interface.
func (t *timed) Push(x any) {
	it := x.(*item)
	it.index = len(*t)
	*t = append(*t, it)
}

// Pop implements heap.Interface.
func (t *timed) Pop() any {
	last := (*t)[len(*t)-1]
	last.index = -1
	(*t)[len(*t)-1] = nil
	*t = (*t)[:len(*t)-1]
	return last
}
