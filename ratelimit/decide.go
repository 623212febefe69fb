package ratelimit

import "time"

// Decide decides about normalized charges at the time at, which is in whole
// milliseconds, and adds them to the counters if all are admitted. A reservation
// may wait for tokens up to within; otherwise it is 0. Without take, for a Peek,
// the decision has no Charges to refund. Decide holds the arithmetic of every
// Limiter, for those who implement one: call it where nobody else can change the
// counters.
func Decide(at time.Time, within time.Duration, take bool, charges []Charge, counters []Counter) Decision {
	d := Decision{At: at}
	d.grow(len(charges))
	var space [fewParts]int64
	elapsed := space[:0]
	rules := make([]rule, len(charges)) // at once: an allocation each costs as much as the rest
	for i := range charges {
		c, p := &charges[i], &d.parts()[i]
		rules[i] = ruleOf(c.Limit)
		p.rule, p.key, p.cost, p.counter = &rules[i], c.Key, c.Cost, counters[i]
		elapsed = append(elapsed, p.rule.elapsed(at.UnixMilli()))
	}
	d.settle(within, take, elapsed)
	for i, p := range d.parts() {
		counters[i] = p.counter
	}
	return d
}

// settle decides about the parts, which hold the counters as they are, and
// charges them if all are admitted. elapsed is how far into its window each is.
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
