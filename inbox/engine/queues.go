package engine

import (
	"math"
	"slices"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// job is one call of the processor. The loop makes it, a worker runs it, and the loop reuses it. Its slice of
// messages is not reused, because a processor may keep it.
type job struct {
	items    []*item
	msgs     []*inbox.Message
	errs     []error
	outcomes []*outcome // of messages that did not succeed; nil: all succeeded
	names    []string   // of handlers whose limit it counts for

	ledger ledgered // of its only item
	alone  bool
	ran    bool // the processor was called; the worker sets it

	began time.Time
	limit time.Time // after this time it is stuck
	stuck bool
	index int // among the running jobs
}

// queues have the items that are ready, and form jobs of them within the limits.
type queues struct {
	cfg    *settings
	to     func(*item, state)
	limits limits

	alone  fifo // one after the other, while nothing else runs
	single fifo // one by one
	fresh  fifo // in batches

	excess  []*item // too many wait for their handlers; these are moved to the retries
	started int     // messages passed to the processor in this run, or about to be
	asking  int     // jobs of those that use the ledger, which may keep messages from the processor
	free    []*job
}

func newQueues(cfg *settings, to func(*item, state)) queues {
	return queues{cfg: cfg, to: to, limits: limits{cfg: cfg, names: map[string]*named{}}}
}

// ready makes an item ready, behind the others of its mode.
func (q *queues) ready(it *item) {
	if it.state != ready {
		q.to(it, ready)
	}
	q.of(it).push(it)
}

// of returns the queue of an item's mode.
func (q *queues) of(it *item) *fifo {
	switch {
	case it.mode == alone:
		return &q.alone
	case it.mode == single || q.cfg.Batch == 1:
		return &q.single
	}
	return &q.fresh
}

// next returns the next job, or nil if none may begin now. Room is how many messages may begin.
func (q *queues) next(now time.Time, room int, wake *alarm) *job {
	room = min(room, q.left())
	for room > 0 && len(q.limits.jobs) < q.cfg.Concurrency {
		if q.alone.n > 0 {
			return q.nextAlone(now, wake)
		}
		if q.limits.solo != nil && now.Before(q.limits.openAt) { // nothing may run beside the solo job
			wake.by(q.limits.openAt)
			return nil
		}
		from := q.older()
		if from == &q.fresh && !q.limits.worth(from, now, wake) {
			from = &q.single
		}
		if from.n == 0 {
			return nil
		}
		j := q.job(now)
		q.fill(j, from, room)
		if len(j.items) > 0 {
			return q.begin(j)
		}
		q.free = append(q.free, j) // the limits of the handlers hold all of the messages back
	}
	return nil
}

// nextAlone returns a job of the item that must run alone, or nil while other jobs run.
func (q *queues) nextAlone(now time.Time, wake *alarm) *job {
	if at := q.limits.patience(now); at.After(now) {
		wake.by(at)
		return nil
	}
	j := q.job(now)
	j.items = append(j.items, q.alone.pop())
	q.limits.solo, q.limits.openAt = j, now.Add(soloPatience)
	return q.begin(j)
}

// older returns the queue whose first item arrived earlier.
func (q *queues) older() *fifo {
	if q.fresh.n == 0 || q.single.n > 0 && !q.fresh.head.arrived.Before(q.single.head.arrived) {
		return &q.single
	}
	return &q.fresh
}

// fill takes the first items of a queue that their handlers' limits allow.
func (q *queues) fill(j *job, from *fifo, room int) {
	most := 1
	if from == &q.fresh {
		most = min(q.cfg.Batch, room)
	}
	for from.n > 0 && len(j.items) < most {
		it := from.pop()
		q.limits.note(it.m.Name, j.began)
		switch {
		case q.limits.admit(j, it):
			j.items = append(j.items, it)
		case q.limits.sendsAway(it, j.began):
			q.excess = append(q.excess, it)
		default:
			q.to(it, limited)
			q.limits.block(it)
		}
	}
}

// begin marks the items of a job as running.
func (q *queues) begin(j *job) *job {
	q.started += len(j.items)
	q.limits.begin(j)
	first := j.items[0]
	j.ledger, j.alone = first.ledger, first.mode == alone
	if j.ledger != untracked {
		q.asking++
	}
	j.msgs = first.one[:0]
	if len(j.items) > 1 || first.one[0] != nil { // the processor may have kept the slice of an earlier run
		j.msgs = make([]*inbox.Message, 0, len(j.items))
	}
	for _, it := range j.items {
		q.to(it, running)
		j.msgs = append(j.msgs, it.m)
	}
	return j
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

// ended frees the places of a finished job, and makes the items ready that waited for them. They go before the others,
// which have arrived later: a message would wait once more if one of these took its place.
func (q *queues) ended(j *job, now time.Time) {
	if j.ledger != untracked {
		q.asking--
	}
	if !j.ran {
		q.started -= len(j.items)
	}
	for _, it := range slices.Backward(q.limits.end(j, now)) {
		q.to(it, ready)
		q.of(it).pushFront(it)
	}
}

// reuse takes back a job that is no longer needed.
func (q *queues) reuse(j *job) {
	clear(j.items)
	*j = job{items: j.items[:0], errs: j.errs[:0], names: j.names[:0]}
	q.free = append(q.free, j)
}

// used reports whether MessageLimit is reached.
func (q *queues) used() bool { return q.left() <= 0 && q.asking == 0 }

// left returns how many messages MessageLimit allows.
func (q *queues) left() int {
	if q.cfg.MessageLimit > 0 {
		return q.cfg.MessageLimit - q.started
	}
	return math.MaxInt
}

// idle reports whether fewer messages are ready than half of the number that the workers take at once.
func (q *queues) idle() bool {
	return len(q.limits.jobs) == 0 || 2*(q.single.n+q.fresh.n) < q.cfg.Concurrency*q.cfg.Batch
}

// empty forgets all items that have not started.
func (q *queues) empty() {
	q.alone, q.single, q.fresh, q.excess = fifo{}, fifo{}, fifo{}, nil
	q.limits.empty()
}

const (
	// soloPatience is how long an item that must run alone waits for running jobs, and how long others wait for it.
	soloPatience = 30 * time.Second

	// gatherMost bounds how long a batch is gathered beside another running batch.
	gatherMost = 50 * time.Millisecond

	// heldWindows bounds the messages that wait for their handlers' limits, in windows.
	heldWindows = 8

	// mixedFor is how long a name counts as sharing the queue.
	mixedFor = 10 * time.Minute

	// windowPause is the time between two new windows that are opened because of messages that wait for a limit,
	// while their name has the queue for itself. A new window costs the broker two calls, and a fast handler uses one
	// up in milliseconds.
	windowPause = time.Second
)

// maxHeld bounds the messages that wait for a limit. Up to it, the consumer looks behind them for messages of other
// names. Above it, the consumer moves them to the retries if other names share the queue.
func maxHeld(cfg *settings) int { return min(heldWindows*cfg.Prefetch, maxWaiting) }

// limits bound the jobs that run at once: in all, beside an item that must run alone, beside another batch,
// and of one handler.
type limits struct {
	cfg  *settings
	jobs []*job // running

	solo   *job      // runs alone
	openAt time.Time // when other jobs may start beside it in any case

	batches int           // running jobs of several messages
	took    time.Duration // by the last of these jobs

	names   map[string]*named // of handlers with a limit
	blocked int               // messages that wait for their handlers
	bytes   int               // of their bodies

	latest, before arrival   // the last message, and the last one of another name
	windowAt       time.Time // when the next window may begin because of blocked messages
}

// arrival is when a message of a name last left its queue.
type arrival struct {
	name string
	at   time.Time
}

// named is a handler with a limit.
type named struct {
	running int // jobs
	waiting fifo
	took    time.Duration // by its last job
	turn    time.Time     // when it may have time for the message last moved to the retries
}

// note records the name of a message that is about to start.
func (l *limits) note(name string, now time.Time) {
	if l.latest.name != name {
		l.before, l.latest = l.latest, arrival{name: name}
	}
	l.latest.at = now
}

// owns reports whether all recent messages of the queue have this name.
func (l *limits) owns(name string, now time.Time) bool {
	other := l.latest
	if other.name == name {
		other = l.before
	}
	return other.at.IsZero() || now.Sub(other.at) > mixedFor
}

// full reports whether the maximum of messages waits for their handlers.
func (l *limits) full() bool { return l.blocked >= maxHeld(l.cfg) || l.bytes >= maxWaitingBytes }

// sendsAway reports whether a message that must wait for its handler is moved to the retries instead. That
// makes room for messages of other names behind it.
func (l *limits) sendsAway(it *item, now time.Time) bool {
	return !l.cfg.Ordered && l.full() && !l.owns(it.m.Name, now)
}

// opensWindow reports whether a new window may begin while the old one is crowded. If messages wait for a
// limit, it begins only while few of them wait: at once if names share the queue, otherwise after
// windowPause.
func (l *limits) opensWindow(now time.Time, wake *alarm) bool {
	switch {
	case l.blocked == 0:
		return true
	case l.full():
		return false
	case !l.owns(l.latest.name, now):
		return true
	case now.Before(l.windowAt):
		wake.by(l.windowAt)
		return false
	}
	l.windowAt = now.Add(windowPause)
	return true
}

// newest returns when the youngest running job started; zero if none runs.
func (l *limits) newest() (at time.Time) {
	for _, j := range l.jobs {
		if j.began.After(at) {
			at = j.began
		}
	}
	return at
}

// inWork returns the messages of all running jobs, the oldest first.
func (l *limits) inWork() (all []driver.Running) {
	for _, j := range l.jobs {
		until := j.began.Add(l.cfg.limit(len(j.items)))
		for _, it := range j.items {
			m := it.m
			all = append(all, driver.Running{
				Consumer: l.cfg.Name, ID: m.ID, Name: m.Name, Key: m.Key, Attempt: m.Attempt, Since: j.began, Until: until,
			})
		}
	}
	slices.SortStableFunc(all, func(a, b driver.Running) int { return a.Since.Compare(b.Since) })
	return all
}

// begin counts a job as running.
func (l *limits) begin(j *job) {
	j.index = len(l.jobs)
	l.jobs = append(l.jobs, j)
	if len(j.items) > 1 {
		l.batches++
	}
}

// end removes a job, and returns items that waited for its handlers: as many as may run in one call.
func (l *limits) end(j *job, now time.Time) (freed []*item) {
	last := l.jobs[len(l.jobs)-1]
	l.jobs[j.index], last.index = last, j.index
	l.jobs[len(l.jobs)-1] = nil
	l.jobs = l.jobs[:len(l.jobs)-1]
	if l.solo == j {
		l.solo = nil
	}
	if len(j.items) > 1 {
		l.batches--
		l.took = now.Sub(j.began)
	}
	for _, name := range j.names {
		n := l.names[name]
		n.running--
		n.took = now.Sub(j.began)
		for range l.cfg.Batch {
			it := n.waiting.pop()
			if it == nil {
				break
			}
			freed = append(freed, it)
			l.blocked--
			l.bytes -= len(it.m.Body)
			if it.mode != batched {
				break
			}
		}
		if n.running == 0 && n.waiting.n == 0 {
			delete(l.names, name)
		}
	}
	return freed
}

// patience returns when an item that must run alone may start: when nothing else runs, or only jobs that have
// run for longer than soloPatience. Nothing else starts until then.
func (l *limits) patience(now time.Time) time.Time {
	at := now
	for _, j := range l.jobs {
		if until := j.began.Add(soloPatience); until.After(at) {
			at = until
		}
	}
	return at
}

// worth reports whether a batch of the queue's first items should start now. Beside another batch it starts
// when it is half full, or after as long as the last batch took, because two halves cost more than one whole.
func (l *limits) worth(fresh *fifo, now time.Time, wake *alarm) bool {
	if l.batches == 0 || fresh.n >= (l.cfg.Batch+1)/2 {
		return true
	}
	at := fresh.head.arrived.Add(min(l.took, gatherMost))
	wake.by(at)
	return !now.Before(at)
}

// admit reports whether a job may take a message, by the limit of its handler.
func (l *limits) admit(j *job, it *item) bool {
	if l.cfg.limiter == nil {
		return true
	}
	most := l.cfg.limiter.Limit(it.m.Name)
	if most <= 0 || slices.Contains(j.names, it.m.Name) {
		return true
	}
	n := l.names[it.m.Name]
	if n == nil {
		n = &named{}
		l.names[it.m.Name] = n
	}
	if n.running >= most {
		return false
	}
	n.running++
	j.names = append(j.names, it.m.Name)
	return true
}

// block makes a message wait for its handler.
func (l *limits) block(it *item) {
	l.names[it.m.Name].waiting.push(it)
	l.blocked++
	l.bytes += len(it.m.Body)
}

// away returns how long a message stays in the retries because too many wait for its handler: until the
// handler may have time for it. The time is spread, so that the messages do not all return at once.
func (l *limits) away(it *item, now time.Time) time.Duration {
	n := l.names[it.m.Name]
	if n.turn.Before(now) {
		n.turn = now
	}
	n.turn = n.turn.Add(n.took / time.Duration(l.cfg.limiter.Limit(it.m.Name)*l.cfg.Batch))
	if latest := now.Add(l.cfg.Retry.MaxDelay); n.turn.After(latest) {
		n.turn = latest
	}
	return max(time.Duration(l.cfg.Rand()*float64(n.turn.Sub(now))), l.cfg.Retry.BaseDelay)
}

// empty removes the messages that wait.
func (l *limits) empty() {
	l.blocked, l.bytes = 0, 0
	for _, n := range l.names {
		n.waiting = fifo{}
	}
}
