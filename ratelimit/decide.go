package ratelimit

import "time"

// counter is the stored state of one limit; driver.Counter is the same type.
type counter = struct {
	// Prev and Cur count the units charged in the previous and in the current window. For a
	// TokenBucket Cur is what is missing from it, and Prev is 0. See driver.Counter.
	Prev, Cur int64
}

// Decide serves those who implement a Limiter: it decides about normalized charges at the time at,
// in whole milliseconds, and writes the decision to d. counters are the states of the limits at that
// time; the charges are added to them if all are admitted. A reservation may wait for tokens up to
// within, which is otherwise 0. If take is false, as for a Peek, d has no Charges to refund.
//
// Nobody else may change the counters between the time that they were read and the time that they
// are stored. Deciding once more about the limits that d holds allocates nothing.
func (d *Decision) Decide(at time.Time, within time.Duration, take bool, charges []Charge, counters []struct{ Prev, Cur int64 }) {
	if !d.holds(charges) {
		*d = Decision{}
		d.grow(len(charges))
		rules := make([]rule, len(charges)) // at once: an allocation each costs as much as the rest
		for i := range charges {
			rules[i] = ruleOf(charges[i].Limit)
			d.parts()[i].rule = &rules[i]
		}
	}
	d.At, d.Fallback, d.Cached, d.taken = at, false, false, false
	d.Never, d.Denied, d.RetryAfter, d.Delay = false, "", 0, 0
	var space [fewParts]int64
	elapsed := space[:0]
	for i := range charges {
		c, p := &charges[i], &d.parts()[i]
		p.key, p.cost, p.counter = c.Key, c.Cost, counters[i]
		elapsed = append(elapsed, p.rule.elapsed(at.UnixMilli()))
	}
	d.settle(within, take, elapsed)
	for i, p := range d.parts() {
		counters[i] = p.counter
	}
}

// holds reports whether d was decided about the limits of the charges, and shares its parts with no
// other decision.
func (d *Decision) holds(charges []Charge) bool {
	if d.n != len(charges) || d.n > fewParts {
		return false
	}
	for i, p := range d.parts() {
		if p.rule.given != charges[i].Limit {
			return false
		}
	}
	return true
}

// Counters serves those who implement a Limiter: it returns the states of the limits after the
// decision, in the order of the charges.
func (d Decision) Counters() []struct{ Prev, Cur int64 } {
	counters := make([]counter, d.n)
	for i, p := range d.parts() {
		counters[i] = p.counter
	}
	return counters
}

// settle decides about the parts, which hold the counters as they are, and charges them if all are
// admitted. elapsed is how far into its window each is.
func (d *Decision) settle(within time.Duration, take bool, elapsed []int64) {
	d.Allowed = true
	parts := d.parts()
	for i := range parts {
		p := &parts[i]
		if p.cost > p.rule.most {
			d.deny(p.rule.Name, 0, true)
			continue
		}
		wait := ms(p.rule.wait(p.counter, p.cost, elapsed[i]))
		switch {
		case wait == 0:
		case p.rule.bucket() && wait <= within:
			d.Delay = max(d.Delay, wait)
		default:
			d.deny(p.rule.Name, wait, false)
		}
	}
	if !d.Allowed {
		d.Delay = 0
		return
	}
	d.taken = take
	for i := range parts {
		parts[i].counter.Cur += parts[i].cost * parts[i].rule.unit
	}
}

// deny notes the limit that takes longest.
func (d *Decision) deny(name string, wait time.Duration, never bool) {
	if d.Never || !d.Allowed && !never && wait <= d.RetryAfter {
		return
	}
	d.Allowed, d.Never, d.Denied, d.RetryAfter = false, never, name, wait
}
