package engine

import (
	"container/heap"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/strict"
)

// state is the state of an item. doc.go draws the states and their transitions.
type state uint8

const (
	arrived   state = iota // nothing is decided yet
	queued                 // behind another message of its key
	ready                  // a worker may take it
	limited                // its handler's limit is reached
	running                // a worker has it
	orphaned               // a worker has it, and its session has ended
	suspected              // failed because a server was unreachable; other messages show who is at fault
	delayed                // waits in this process for a time
	outbound               // being moved to another queue, or to the store of stopped keys
	lost                   // the broker redelivers it; an ordered message keeps its key until its session has ended
	done                   // acknowledged, requeued, moved or dropped
)

// drawn has the transitions of doc.go: the states that may follow each state.
var drawn = [...][]state{
	arrived:   {queued, ready, delayed, suspected},
	queued:    {ready, delayed, done},
	ready:     {running, limited, outbound, done},
	limited:   {ready, done},
	running:   {ready, orphaned, suspected, delayed, outbound, lost, done},
	orphaned:  {running, done},
	suspected: {ready, delayed, outbound, lost, done},
	delayed:   {ready, outbound, done},
	outbound:  {delayed, lost, done},
	lost:      {done},
	done:      {},
}

// mode controls which items may run together with an item.
type mode uint8

const (
	batched mode = iota // it may share a call with other items
	single              // it has a call of its own
	alone               // nothing else runs: it may have ended the process
)

// ledgered records whether the runs of an item are recorded in the ledger.
type ledgered uint8

const (
	untracked ledgered = iota // its runs are not recorded
	tracked                   // they are recorded, and the worker reads the ledger first
	asked                     // they are recorded, and the ledger was read
)

// item is a delivery in flight. The receiver creates it, then the loop owns it. A worker reads the message of
// a running item, and the mover reads an outbound item.
type item struct {
	d       driver.Delivery
	m       *inbox.Message // as it is processed: in ordered mode the next attempt
	session *session
	key     string // of ordered consumption; empty: none

	state   state // only inflight.to writes it
	mode    mode
	ledger  ledgered
	waiting bool // counted in inflight.waiting

	arrived time.Time
	epoch   int // the window in which it is counted

	probe   int       // the number of its probe; 0: none
	mark    uint64    // the suspects' mark at the start of its run
	since   time.Time // when it was suspected
	outcome *outcome  // of its last run; nil: it succeeded
	order   order     // its destination

	one   [1]*inbox.Message // the messages of a job of its own
	due   time.Time         // of a delayed item
	index int               // in the heap of delayed items; -1: not in it

	prev, next *item // all items by arrival
	link       *item // the next in its queue
}

// twin identifies a delivery over sessions: the broker redelivers it after its session has ended.
type twin struct {
	id               uuid.UUID
	replays, attempt int
}

// twin uses the message as it arrived, because the broker does not know the attempts made in this process.
func (it *item) twin() twin {
	m := it.d.Message()
	return twin{m.ID, m.Replays, m.Attempt}
}

// reset prepares an item for a new run that does not depend on the last one: the ledger is read again.
func (it *item) reset() {
	it.order, it.outcome = order{}, nil
	it.mode = min(it.mode, single)
	it.ledger = min(it.ledger, tracked)
}

// progress is the attempt that an ordered message had reached when its session ended.
type progress struct {
	m   *inbox.Message
	due time.Time
}

// inflight holds the deliveries that are not settled, and decides which of them runs next. It uses no clock
// and no goroutine. Only the loop uses it.
type inflight struct {
	cfg     *settings
	all     list
	keys    map[string]*lane
	queues  queues
	delayed timed
	waiting waiting
	scanAt  time.Time // the time of the next scan of overstayed; zero: never
	broken  bool      // ordered: the broker redelivers an item whose session has not ended

	orphans map[twin]*item
	reached map[twin]progress
}

func newInflight(cfg *settings) *inflight {
	f := &inflight{cfg: cfg, keys: map[string]*lane{}, orphans: map[twin]*item{}, reached: map[twin]progress{}}
	f.queues = newQueues(cfg, f.to)
	return f
}

// to is the only writer of an item's state. It counts the items that wait without a worker.
func (f *inflight) to(it *item, s state) {
	if strict.On && !slices.Contains(drawn[it.state], s) {
		panic(fmt.Sprintf("inbox/engine: transition from state %d to state %d", it.state, s))
	}
	it.state = s
	switch s {
	case limited, delayed:
		f.waiting.add(it)
	case ready, running, lost, done:
		f.waiting.remove(it)
	}
}

// add takes an item that has arrived. If its twin still runs for an ended session, that run settles the new
// delivery. An item with aside set becomes a suspect at once.
func (f *inflight) add(it *item, aside bool, now time.Time) {
	it.arrived, it.epoch, it.index = now, f.waiting.epoch, -1
	if len(f.orphans) > 0 {
		if old := f.orphans[it.twin()]; old != nil {
			f.adopt(old, it)
			return
		}
	}
	f.all.add(it)
	if f.cfg.tracks(it.m) {
		it.ledger = tracked
	}
	if it.ledger == tracked || it.m.Attempt > 1 {
		it.mode = single
	}
	switch {
	case it.key != "" && !f.enter(it):
		f.to(it, queued)
	case aside:
		f.to(it, suspected)
	default:
		f.first(it)
	}
}

// adopt gives an orphaned item the delivery of its twin.
func (f *inflight) adopt(old, twin *item) {
	delete(f.orphans, old.twin())
	f.all.remove(old)
	old.d, old.session, old.arrived, old.epoch = twin.d, twin.session, twin.arrived, twin.epoch
	f.all.add(old)
	f.to(old, running)
}

// first makes the first item of a key ready, or delays it until its next attempt is due.
func (f *inflight) first(it *item) {
	if len(f.reached) > 0 {
		if reached, ok := f.reached[it.twin()]; ok {
			delete(f.reached, it.twin())
			it.m, it.mode = reached.m, single
			f.delay(it, reached.due)
			return
		}
	}
	f.ready(it)
}

// ready puts an item into the queue of its mode.
func (f *inflight) ready(it *item) { f.queues.ready(it) }

// delay makes an item wait for a time. Then it is ready, or outbound if it has an order.
func (f *inflight) delay(it *item, due time.Time) {
	f.to(it, delayed)
	it.due = due
	heap.Push(&f.delayed, it)
}

// due makes the delayed items ready that are due, and returns those with an order.
func (f *inflight) due(now time.Time, wake *alarm) (orders []*item) {
	for len(f.delayed) > 0 {
		if next := f.delayed[0]; next.due.After(now) {
			wake.by(next.due)
			break
		}
		it := heap.Pop(&f.delayed).(*item)
		if it.order.target != 0 {
			orders = append(orders, it)
			continue
		}
		f.ready(it)
	}
	return orders
}

// gone ends an item. The next item of its key is ready.
func (f *inflight) gone(it *item) {
	if it.state == orphaned && f.orphans[it.twin()] == it {
		delete(f.orphans, it.twin())
	}
	f.to(it, done)
	f.all.remove(it)
	if it.key == "" {
		return
	}
	if next := f.leave(it); next != nil {
		f.first(next)
	}
}

// lose ends an item that the broker redelivers. An ordered item keeps its place until the loop has seen the
// end of its session. Otherwise the next message of its key would overtake it.
func (f *inflight) lose(it *item) {
	if f.cfg.Ordered && !it.session.ended {
		f.to(it, lost)
		f.broken = f.broken || !it.session.over.Load()
		return
	}
	f.remember(it)
	f.gone(it)
}

// drop forgets the deliveries of an ended session, because the broker redelivers them. Running items become orphans,
// which wait for their twins. It returns the number of dropped items.
func (f *inflight) drop(now time.Time) (dropped int) {
	var next *item
	for it := f.all.head; it != nil; it = next {
		next = it.next
		switch it.state {
		case running:
			if ids.Check(it.m.ID) == nil { // without an id it has no twin
				f.orphans[it.twin()] = it
			}
			f.to(it, orphaned)
			it.arrived = now // for renewAt, which concerns the next session
		case orphaned, outbound:
			it.arrived = now
		default:
			f.remember(it)
			f.to(it, done)
			f.all.remove(it)
			dropped++
		}
	}
	f.queues.empty()
	f.delayed, f.broken = nil, false
	for key, l := range f.keys {
		l.behind = fifo{}
		if l.first.state == done {
			delete(f.keys, key)
		}
	}
	f.waiting.renew()
	return dropped
}

// remember keeps the attempt that a message has reached, if the broker does not know it. The number of
// entries is bounded, because other processes may get the messages.
func (f *inflight) remember(it *item) {
	if it.m == it.d.Message() {
		return
	}
	if len(f.reached) >= 2*f.cfg.Prefetch {
		clear(f.reached)
	}
	f.reached[it.twin()] = progress{it.m, it.due}
}

// unstarted removes and returns the items that may be requeued: the ready and queued ones, and with heldToo
// also the suspected and delayed ones.
func (f *inflight) unstarted(heldToo bool) (back []*item) {
	for it := f.all.head; it != nil; it = it.next {
		switch it.state {
		case ready, queued, limited:
			back = append(back, it)
		case suspected, delayed:
			if heldToo {
				back = append(back, it)
			}
		}
	}
	f.queues.empty()
	if heldToo {
		f.delayed = nil
	}
	return back
}

// overstayed removes and returns the items that the broker would soon take back. It scans at intervals. An
// ordered session is renewed instead; see renewAt.
func (f *inflight) overstayed(now time.Time, wake *alarm) (back []*item) {
	hold := f.cfg.traits.Hold
	if hold == 0 || f.cfg.Ordered {
		return nil
	}
	if now.Before(f.scanAt) {
		wake.by(f.scanAt)
		return nil
	}
	f.scanAt = now.Add(hold / 16)
	wake.by(f.scanAt)
	since := now.Add(-hold / 2)
	var young []*item
	for it := f.all.head; it != nil; it = it.next {
		old := it.arrived.Before(since)
		switch it.state {
		case suspected, delayed:
			if !old {
				continue
			}
			if it.index >= 0 {
				heap.Remove(&f.delayed, it.index)
			}
			back = append(back, it)
		case ready, limited:
			if old {
				back = append(back, it)
			} else {
				young = append(young, it)
			}
		}
	}
	if len(back) == 0 {
		return nil
	}
	f.queues.empty()
	for _, it := range young {
		f.ready(it)
	}
	return back
}

// renewAt returns when an ordered session must be renewed, before the broker takes its messages back; zero:
// never.
func (f *inflight) renewAt() time.Time {
	if f.cfg.traits.Hold == 0 || !f.cfg.Ordered || f.all.head == nil {
		return time.Time{}
	}
	return f.all.head.arrived.Add(f.cfg.traits.Hold / 2)
}

const (
	// maxWaiting and maxWaitingBytes bound the messages that wait without a worker.
	maxWaiting      = 1000
	maxWaitingBytes = 64 << 20
)

// crowded reports whether waiting messages fill half of the window, so that a new window is needed.
func (f *inflight) crowded() bool { return f.waiting.now >= (f.cfg.Prefetch+1)/2 }

// full reports whether no more messages may arrive, because too many wait. Messages that wait for their
// handler's limit are not counted: they have not failed.
func (f *inflight) full() bool {
	limits := &f.queues.limits
	n := f.waiting.n - limits.blocked
	if f.cfg.Ordered {
		return n >= f.cfg.Prefetch
	}
	return n >= maxWaiting || f.waiting.bytes-limits.bytes >= maxWaitingBytes
}

// lane has the items of one key in their order. The first one is being processed.
type lane struct {
	first  *item
	behind fifo
}

// enter appends an item to the lane of its key, and reports whether it is the first.
func (f *inflight) enter(it *item) bool {
	l := f.keys[it.key]
	if l == nil {
		f.keys[it.key] = &lane{first: it}
		return true
	}
	l.behind.push(it)
	return false
}

// leave takes the first item out of the lane of its key and returns the next one.
func (f *inflight) leave(it *item) (next *item) {
	l := f.keys[it.key]
	if l == nil || l.first != it {
		return nil
	}
	if l.first = l.behind.pop(); l.first == nil {
		delete(f.keys, it.key)
	}
	return l.first
}

// waiting counts the items that wait without a worker. Each of them occupies a place in the window.
type waiting struct {
	n, bytes int
	epoch    int // of the window
	now      int // items of this epoch
}

func (w *waiting) add(it *item) {
	if it.waiting {
		return
	}
	it.waiting = true
	w.n++
	w.bytes += len(it.m.Body)
	if it.epoch == w.epoch {
		w.now++
	}
}

func (w *waiting) remove(it *item) {
	if !it.waiting {
		return
	}
	it.waiting = false
	w.n--
	w.bytes -= len(it.m.Body)
	if it.epoch == w.epoch {
		w.now--
	}
}

// renew starts a new window, in which the items already in flight do not count.
func (w *waiting) renew() { w.epoch, w.now = w.epoch+1, 0 }

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

func (f *fifo) pushFront(it *item) {
	it.link = f.head
	f.head = it
	if f.tail == nil {
		f.tail = it
	}
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

// list has all items by their arrival.
type list struct {
	head, tail *item
	n          int
}

func (l *list) add(it *item) {
	it.prev, it.next = l.tail, nil
	if l.tail == nil {
		l.head = it
	} else {
		l.tail.next = it
	}
	l.tail = it
	l.n++
}

func (l *list) remove(it *item) {
	if it.prev == nil {
		l.head = it.next
	} else {
		it.prev.next = it.next
	}
	if it.next == nil {
		l.tail = it.prev
	} else {
		it.next.prev = it.prev
	}
	it.prev, it.next = nil, nil
	l.n--
}

// timed is a heap of delayed items by their time. It implements heap.Interface.
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
