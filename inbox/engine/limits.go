package engine

import (
	"slices"
	"time"
)

const (
	// soloPatience is how long a suspect waits for the other messages to end, and then runs alone.
	soloPatience = 30 * time.Second

	// gatherMost bounds how long a batch gathers beside another one.
	gatherMost = 50 * time.Millisecond

	// heldWindows is how many windows of messages may wait in hand for the limits of their handlers.
	heldWindows = 8

	// mixedFor is how long a name counts as one of those that share the queue.
	mixedFor = 10 * time.Minute
)

// maxHeld bounds the messages that wait in hand because of a limit. While there are fewer, the consumer looks
// behind them for messages of other names. With more it sends them away, if other names share the queue.
func maxHeld(cfg *settings) int { return min(heldWindows*cfg.Prefetch, maxWaiting) }

// limits say how much may run at once: in all, beside a suspect, beside another batch, and of one
// handler.
type limits struct {
	cfg   *settings
	crowd *crowd
	jobs  []*job // that run

	suspect   *job      // that runs alone
	openAt    time.Time // when others may begin beside it all the same
	patientTo time.Time // when a suspect that waits begins beside others, as of the last look

	batches int           // of several messages, that run
	took    time.Duration // by the last of them

	names   map[string]*named // of handlers with a limit
	blocked int               // messages that wait for their handlers
	bytes   int               // of their bodies

	latest, before arrival // the last message, and the last one of another name
}

// arrival is when a message of a name was last taken out of its queue.
type arrival struct {
	name string
	at   time.Time
}

// named is a handler with a limit.
type named struct {
	running int // jobs
	waiting fifo
	took    time.Duration // by its last job
	turn    time.Time     // when it may have time for what was sent away last
}

func newLimits(cfg *settings, crowd *crowd) limits {
	return limits{cfg: cfg, crowd: crowd, names: map[string]*named{}}
}

// note notes the name of a message that is about to begin.
func (l *limits) note(name string, now time.Time) {
	if l.latest.name != name {
		l.before, l.latest = l.latest, arrival{name: name}
	}
	l.latest.at = now
}

// alone reports whether a name has the queue for itself, as far as is known.
func (l *limits) alone(name string, now time.Time) bool {
	other := l.latest
	if other.name == name {
		other = l.before
	}
	return other.at.IsZero() || now.Sub(other.at) > mixedFor
}

// full reports whether no more messages are to wait for their handlers.
func (l *limits) full() bool { return l.blocked >= maxHeld(l.cfg) || l.bytes >= maxWaitingBytes }

// sendsAway reports whether a message that its handler's limit keeps back is sent away: others may be behind those
// that wait.
func (l *limits) sendsAway(it *item, now time.Time) bool {
	return !l.cfg.Ordered && l.full() && !l.alone(it.m.Name, now)
}

// free reports whether there is a worker for one more job.
func (l *limits) free() bool { return len(l.jobs) < l.cfg.Concurrency }

// newest returns when the last of the jobs that run began; zero: none runs.
func (l *limits) newest() (at time.Time) {
	for _, j := range l.jobs {
		if j.began.After(at) {
			at = j.began
		}
	}
	return at
}

// begin takes the place of a job.
func (l *limits) begin(j *job) {
	j.index = len(l.jobs)
	l.jobs = append(l.jobs, j)
	if len(j.items) == 1 {
		return
	}
	l.batches++
}

// end frees the place of a job, and returns those that waited for its handlers: what may run in one
// call.
func (l *limits) end(j *job, now time.Time) (freed []*item) {
	last := l.jobs[len(l.jobs)-1]
	l.jobs[j.index], last.index = last, j.index
	l.jobs[len(l.jobs)-1] = nil
	l.jobs = l.jobs[:len(l.jobs)-1]
	if l.suspect == j {
		l.suspect = nil
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
			l.crowd.remove(it)
			l.blocked--
			l.bytes -= len(it.m.Body)
			if it.single {
				break
			}
		}
		if n.running == 0 && n.waiting.n == 0 {
			delete(l.names, name)
		}
	}
	return freed
}

// maySolo reports whether a suspect may begin: nothing runs but what has run for longer than it waits.
// From now on nothing else begins.
func (l *limits) maySolo(now time.Time) bool {
	l.patientTo = now
	for _, j := range l.jobs {
		if at := j.began.Add(soloPatience); at.After(l.patientTo) {
			l.patientTo = at
		}
	}
	return !l.patientTo.After(now)
}

// shut reports whether a suspect runs that nothing may run beside.
func (l *limits) shut(now time.Time) bool { return l.suspect != nil && now.Before(l.openAt) }

// worth reports whether a batch of the queue's first items should begin now. Beside another one it
// does when there are half as many as may be, or when waiting has cost as long as that one takes:
// two halves cost more than one whole.
func (l *limits) worth(fresh *fifo, now time.Time) bool {
	return l.batches == 0 || fresh.n >= (l.cfg.Batch+1)/2 || !now.Before(l.gatheredAt(fresh))
}

func (l *limits) gatheredAt(fresh *fifo) time.Time {
	return fresh.head.arrived.Add(min(l.took, gatherMost))
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

// block has a message wait for its handler.
func (l *limits) block(it *item) {
	it.state = queued
	l.names[it.m.Name].waiting.push(it)
	l.crowd.add(it)
	l.blocked++
	l.bytes += len(it.m.Body)
}

// away is how long a message stays away of whose handler's too many wait: until that may have time for
// it, or it would come again and again. It is spread, as not all should come at once.
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

// empty forgets what waits.
func (l *limits) empty() {
	l.blocked, l.bytes = 0, 0
	for _, n := range l.names {
		for it := n.waiting.pop(); it != nil; it = n.waiting.pop() {
			l.crowd.remove(it)
		}
	}
}

// wake returns when something may begin that may not now; zero: at no time known.
func (l *limits) wake(suspect bool, fresh *fifo) time.Time {
	switch {
	case suspect:
		return l.patientTo
	case l.suspect != nil:
		return l.openAt
	case fresh.n > 0:
		return l.gatheredAt(fresh)
	}
	return time.Time{}
}
