package ratelimit

import (
	"math"
	"time"
)

// rule is a valid Limit in the form that the arithmetic needs.
type rule struct {
	Limit       // with defaults
	given Limit // as the caller wrote it

	w    int64 // the window in milliseconds
	most int64 // what one charge can take at once
	unit int64 // what one unit adds to counter.Cur
	full int64 // what the limit holds, in units times w
}

func ruleOf(given Limit) rule {
	l := given.withDefaults()
	r := rule{Limit: l, given: given, w: l.windowMS(), most: l.Max, unit: 1}
	if r.bucket() {
		r.most, r.unit = l.Burst, r.w
	}
	r.full = r.most * r.w
	return r
}

func (r *rule) bucket() bool { return r.Algorithm == TokenBucket }

// used returns what counts against full, elapsed milliseconds into the window.
func (r *rule) used(c counter, elapsed int64) int64 {
	switch r.Algorithm {
	case TokenBucket:
		return c.Cur
	case FixedWindow:
		return c.Cur * r.w
	}
	return c.Prev*(r.w-elapsed) + c.Cur*r.w
}

// wait returns the milliseconds until the rule admits cost if nobody else charges anything, 0 if it
// does now. cost is at most r.most.
func (r *rule) wait(c counter, cost, elapsed int64) int64 {
	over := r.used(c, elapsed) + cost*r.w - r.full
	switch {
	case over <= 0:
		return 0
	case r.bucket():
		return ceilDiv(over, r.Max)
	case r.Algorithm == FixedWindow:
		return r.w - elapsed
	case c.Cur+cost <= r.Max: // enough of the previous window will have passed
		return r.w - (r.Max-c.Cur-cost)*r.w/c.Prev - elapsed
	}
	return r.w - elapsed + max(0, r.w-(r.Max-cost)*r.w/c.Cur) // the same, one window on
}

func (r *rule) remaining(c counter, elapsed int64) int64 {
	return max(0, r.full-r.used(c, elapsed)) / r.w
}

// reset returns the milliseconds until the window ends or the bucket is full.
func (r *rule) reset(c counter, elapsed int64) int64 {
	if r.bucket() {
		return ceilDiv(c.Cur, r.Max)
	}
	return r.w - elapsed
}

// elapsed returns how far into its window now is, 0 for a bucket.
func (r *rule) elapsed(now int64) int64 {
	if r.bucket() {
		return 0
	}
	return now % r.w
}

// drain returns what is missing from a bucket elapsed milliseconds after missing was.
func (r *rule) drain(missing, elapsed int64) int64 {
	switch {
	case elapsed <= 0:
		return missing
	case elapsed > missing/r.Max:
		return 0
	}
	return missing - elapsed*r.Max
}

// refund takes a charge that counts since that time off the counter, which is brought forward to now.
func (r *rule) refund(c *counter, cost, since, now int64) {
	cost = min(cost, r.most) // more cannot have been charged
	if r.bucket() {
		c.Cur -= min(c.Cur, r.drain(cost*r.unit, now-since))
		return
	}
	switch now/r.w - since/r.w {
	case 0:
		c.Cur -= min(c.Cur, cost)
	case 1:
		c.Prev -= min(c.Prev, cost)
	}
}

func ceilDiv(a, b int64) int64 {
	if a <= 0 {
		return 0
	}
	return (a + b - 1) / b
}

// ms converts without overflow, and leaves room for rounding up: a bucket that someone else has
// filled with nonsense may take longer to drain than a Duration can say.
func ms(n int64) time.Duration {
	return time.Duration(min(n, math.MaxInt64/2/int64(time.Millisecond))) * time.Millisecond
}

// countsWith reports whether two rules share their counter under one key.
func (r *rule) countsWith(other *rule) bool {
	return r.Name == other.Name && r.bucket() == other.bucket() && r.w == other.w
}
