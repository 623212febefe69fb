package ratelimit

import "time"

const (
	// leaseHold is how long units are held before they are given back, twice that at most. A lease that
	// is used up sooner is doubled, so a busy one costs ten to twenty trips a second.
	leaseHold = 100 * time.Millisecond
	// driftShare is the part by which the clocks of process and store may run apart: hundreds of times
	// what a clock that is being corrected is off.
	driftShare = 100
	// clockSlack is the milliseconds that are lost to rounding twice.
	clockSlack = 2
)

// lease is what a process holds of one limit and key.
type lease struct {
	counted           // the store's counter as of the last answer
	units   int64     // charged to that window at the store, and not spent yet
	at      int64     // the store's time in an answer, in milliseconds
	asked   time.Time // when that answer, the last one, was asked for; zero before the first
	ahead   int64     // how many units were taken ahead last
	taken   time.Time // when these were asked for
	taking  bool      // a call is about to take some
	calls   int       // under way, which may bring units back
}

// clock returns a time that the store's clock has not passed, some milliseconds after what it shows.
func (l *lease) clock(now time.Time) int64 {
	// The monotonic clock stands while a machine is suspended, the other one may be set back.
	passed := max(now.Sub(l.asked), time.Duration(now.UnixNano()-l.asked.UnixNano()))
	return l.at + (passed + passed/driftShare).Milliseconds() + clockSlack
}

// spendable returns the units that may be spent at a time that the store's clock has not passed.
func (l *lease) spendable(at int64) int64 {
	if at >= l.since+l.rule.w {
		return 0
	}
	return l.units
}

// next returns how many units to take ahead: twice as many as last time if these did not last, and at
// most the share of what is left. Nothing is taken ahead on the first call, nor of the last units.
func (l *lease) next(now time.Time, share int64) int64 {
	if l.asked.IsZero() {
		return 0
	}
	ahead := l.ahead / 2
	if now.Sub(l.asked) < leaseHold {
		ahead = max(1, 2*l.ahead)
	}
	c, elapsed := l.counter(l.rule, l.clock(now))
	return min(ahead, l.rule.remaining(c, elapsed)/share)
}

// learn notes the store's counter after an answer. Units of another window are returned, with the time
// they count from, to be given back: a sliding window weighs them on.
func (l *lease) learn(c counter, answered int64, asked time.Time) (units, since int64) {
	elapsed := l.rule.elapsed(answered)
	if answered-elapsed != l.since {
		units, since, l.units = l.units, l.since, 0
	}
	l.set(l.rule, c, answered, elapsed)
	l.at, l.asked = answered, asked
	return units, since
}

// add puts units of a window into the lease, and returns those for which there is no room, to be given
// back.
func (l *lease) add(units, since, most int64) (back int64) {
	if since != l.since {
		return units
	}
	l.units += units
	back = max(0, l.units-most)
	l.units -= back
	return back
}

// state returns the store's counter at a time without the units that are held here.
func (l *lease) state(at int64) counter {
	c, _ := l.counter(l.rule, max(at, l.since))
	c.Cur = max(0, c.Cur-l.units)
	return c
}
