package ratelimit

import (
	"math"
	"time"
)

// Counter is the stored state of one limit, brought forward to the time of the
// decision.
type Counter struct {
	// Prev and Cur count the units charged in the previous and in the current
	// window of a SlidingWindow; windows are aligned to the Unix epoch. For a
	// TokenBucket, Cur is what is missing from a full bucket, in units times the
	// window's milliseconds, so that Max of them come back every millisecond; Prev
	// is 0. It exceeds the bucket while reservations wait.
	Prev, Cur int64
}

// Decide decides about normalized charges at the time at, which is in whole
// milliseconds, and adds them to the counters if all are admitted. A
// reservation may wait for tokens up to within; otherwise it is 0. Decide holds
// the arithmetic of every Limiter, for those who implement one: call it where
// nobody else can change the counters.
func Decide(at time.Time, within time.Duration, charges []Charge, counters []Counter) Decision {
	now := at.UnixMilli()
	d := Decision{Allowed: true, At: at, Limits: make([]State, len(charges))}
	for i, c := range charges {
		l := c.Limit
		d.Limits[i] = State{Name: l.Name, Max: l.Max, Window: l.Window, Reset: ms(resetAfter(l, counters[i], now))}
		if c.Cost > l.capacity() {
			d.deny(l.Name, 0, true)
			continue
		}
		wait := ms(waitFor(l, counters[i], c.Cost, now))
		switch {
		case wait == 0:
		case l.Algorithm == TokenBucket && wait <= within:
			d.Delay = max(d.Delay, wait)
		default:
			d.Limits[i].Reset = wait
			d.deny(l.Name, wait, false)
		}
	}
	if d.Allowed {
		d.Charges = make([]Charge, len(charges))
		for i, c := range charges {
			c.At = startsAt(c.Limit, counters[i], at)
			counters[i].Cur += c.Cost * unit(c.Limit)
			d.Charges[i] = c
			d.Limits[i].Reset = ms(resetAfter(c.Limit, counters[i], now))
		}
	} else {
		d.Delay = 0
	}
	for i, c := range charges {
		d.Limits[i].Remaining = remaining(c.Limit, counters[i], now)
	}
	return d
}

// deny notes the limit that takes longest.
func (d *Decision) deny(name string, wait time.Duration, never bool) {
	if d.Never || !d.Allowed && !never && wait <= d.RetryAfter {
		return
	}
	d.Allowed, d.Never, d.Denied, d.RetryAfter = false, never, name, wait
}

// giveBack takes a normalized charge off the counter at the time at, as Refund
// promises.
func giveBack(at time.Time, c Charge, counter *Counter) {
	now, since := at.UnixMilli(), c.At.UnixMilli()
	if c.At.IsZero() {
		since = now
	}
	if c.Limit.Algorithm == TokenBucket {
		counter.Cur -= min(counter.Cur, undrained(c, now-since))
		return
	}
	w := c.Limit.windowMS()
	switch now/w - since/w {
	case 0:
		counter.Cur -= min(counter.Cur, c.Cost)
	case 1:
		counter.Prev -= min(counter.Prev, c.Cost)
	}
}

// undrained is how much of a charge the bucket has not regained, elapsed
// milliseconds after it began to regain it.
func undrained(c Charge, elapsed int64) int64 {
	charged := min(c.Cost, c.Limit.Burst) * unit(c.Limit)
	switch {
	case elapsed <= 0:
		return charged
	case elapsed > charged/c.Limit.Max:
		return 0
	}
	return charged - elapsed*c.Limit.Max
}

// waitFor returns the milliseconds until the limit admits cost if nobody else
// charges anything, 0 if it does now. cost is at most the limit's capacity.
func waitFor(l Limit, c Counter, cost, now int64) int64 {
	w := l.windowMS()
	if l.Algorithm == TokenBucket {
		return ceilDiv(c.Cur+cost*w-l.Burst*w, l.Max)
	}
	elapsed := now % w
	if c.Prev*(w-elapsed)+(c.Cur+cost)*w <= l.Max*w {
		return 0
	}
	if c.Cur+cost <= l.Max { // enough of the previous window will have passed
		return w - (l.Max-c.Cur-cost)*w/c.Prev - elapsed
	}
	return w - elapsed + max(0, w-(l.Max-cost)*w/c.Cur) // the same, one window on
}

func remaining(l Limit, c Counter, now int64) int64 {
	w := l.windowMS()
	if l.Algorithm == TokenBucket {
		return max(0, l.Burst*w-c.Cur) / w
	}
	return max(0, (l.Max-c.Cur)*w-c.Prev*(w-now%w)) / w
}

func resetAfter(l Limit, c Counter, now int64) int64 {
	if l.Algorithm == TokenBucket {
		return ceilDiv(c.Cur, l.Max)
	}
	return l.windowMS() - now%l.windowMS()
}

// startsAt is the time from which a charge's own units count: those of a bucket
// are regained after all that were charged before.
func startsAt(l Limit, c Counter, at time.Time) time.Time {
	if l.Algorithm == TokenBucket {
		return at.Add(ms(c.Cur / l.Max))
	}
	return at
}

// unit is what one unit of cost adds to Counter.Cur.
func unit(l Limit) int64 {
	if l.Algorithm == TokenBucket {
		return l.windowMS()
	}
	return 1
}

func ceilDiv(a, b int64) int64 {
	if a <= 0 {
		return 0
	}
	return (a + b - 1) / b
}

// ms converts without overflow, and leaves room for rounding up: a bucket that
// someone else has filled with nonsense may take longer to drain than a Duration
// can say.
func ms(n int64) time.Duration {
	return time.Duration(min(n, math.MaxInt64/2/int64(time.Millisecond))) * time.Millisecond
}
