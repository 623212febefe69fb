package ratelimit

import (
	"context"
	"time"

	"github.com/holdfast-go/holdfast/ratelimit/internal/table"
)

// need is what a call of Leased needs of one limit and key.
type need struct {
	hash  uint64
	cost  int64
	lease *table.Entry[lease] // nil: this limit and key are asked of the store each time

	units  int64 // of the cost that the lease holds
	since  int64 // the time from which they count
	ahead  int64 // what to take beyond the cost
	taking bool  // the call is the one that takes ahead
}

// missing is what the store is asked for.
func (n *need) missing() int64 { return n.cost - n.units + n.ahead }

// outcome is what became of the needs of a call.
type outcome int

const (
	notLeased outcome = iota // the store decides about all of it
	toAsk                    // units are missing
	spent                    // all was held, and is decided
)

// spend takes the units of all charges if they are held, and decides. Otherwise it takes what is held.
func (l *Leased) spend(d *Decision, charges []Charge, needs []need) outcome {
	var locked table.Set
	for i := range charges {
		needs[i].hash, needs[i].cost = l.leases.Hash(charges[i].Key), max(charges[i].Cost, 1)
		locked |= table.SetOf(needs[i].hash)
	}
	l.leases.Lock(locked)
	defer l.leases.Unlock(locked)
	if !l.resolve(charges, needs) {
		return notLeased
	}
	now := time.Now()
	at := int64(0)
	for i := range needs {
		if e := needs[i].lease; e != nil && !e.Value.asked.IsZero() {
			at = max(at, e.Value.clock(now))
		}
	}
	enough, leased := true, false
	for i := range needs {
		n := &needs[i]
		if n.lease != nil {
			n.units, leased = min(n.lease.Value.spendable(at), n.cost), true
		}
		enough = enough && n.units == n.cost
	}
	switch {
	case !leased:
		return notLeased
	case !enough:
		for i := range needs {
			needs[i].take(now, l.cfg.Share)
		}
		return toAsk
	}
	d.grow(len(charges))
	d.At, d.Allowed, d.taken = time.UnixMilli(at), true, true
	parts := d.parts()
	for i := range parts {
		p, e := &parts[i], &needs[i].lease.Value
		e.units -= needs[i].cost
		p.rule, p.key, p.cost, p.counter = e.rule, charges[i].Key, needs[i].cost, e.state(at)
	}
	return spent
}

// resolve finds the leases of the charges, or makes them. It reports false if the store is to decide
// about all: charges that make no sense, or a cost that never fits.
func (l *Leased) resolve(charges []Charge, needs []need) bool {
	for i := range needs {
		n, charge := &needs[i], &charges[i]
		if charge.Cost < 0 || charged(charges[:i], *charge) {
			return false
		}
		if charge.Limit.Algorithm == TokenBucket || charge.Limit.Max < l.cfg.Share {
			continue
		}
		if n.cost > charge.Limit.Max {
			return false
		}
		s := l.leases.Shard(n.hash)
		for j := s.Home(n.hash); s.Slots[j].Entry != nil; j = s.Next(j) {
			if e := s.Slots[j].Entry; s.Slots[j].Hash == n.hash && e.Value.rule.given == charge.Limit && e.Key == charge.Key {
				n.lease = e
				break
			}
		}
		if n.lease != nil || l.leases.Len() >= maxLeases {
			continue
		}
		if r := l.rules.of(charge.Limit); r != nil {
			n.lease = s.Insert(n.hash, charge.Key, nil, nil) // there is room
			n.lease.Value.rule = r
		}
	}
	return true
}

// take takes from the lease what it holds of the cost. One call at a time is to take more from the store
// than it needs.
func (n *need) take(now time.Time, share int64) {
	if n.lease == nil {
		return
	}
	e := &n.lease.Value
	e.calls++
	e.units -= n.units
	n.since = e.since
	if n.units < n.cost && !e.taking {
		e.taking, n.taking, n.ahead = true, true, e.next(now, share)
	}
}

// ask has the store decide about what is missing.
func (l *Leased) ask(ctx context.Context, charges []Charge, needs []need) (Decision, error) {
	asked, returned := time.Now(), false
	defer func() {
		if !returned { // the store panicked: what was taken goes back, and others may take again
			l.settle(ctx, Decision{}, asked, charges, needs)
		}
	}()
	d, err := l.store.Allow(ctx, missing(charges, needs)...)
	if err == nil && !d.Allowed && withoutAhead(d.Denied, charges, needs) {
		asked = time.Now()
		d, err = l.store.Allow(ctx, missing(charges, needs)...)
	}
	if err == nil && d.Allowed && !d.Fallback && crossed(d.At.UnixMilli(), charges, needs) {
		l.giveBack(ctx, d.Charges())
		returned = true
		_ = l.settle(ctx, Decision{}, asked, charges, needs)
		return l.store.Allow(ctx, charges...)
	}
	returned = true
	return l.settle(ctx, d, asked, charges, needs), err
}

// missing returns the charges that the store is to decide about.
func missing(charges []Charge, needs []need) []Charge {
	asked := make([]Charge, 0, len(charges))
	for i, c := range charges {
		if c.Cost = needs[i].missing(); c.Cost > 0 {
			asked = append(asked, c)
		}
	}
	return asked
}

// withoutAhead reports whether the limit that denied may have denied what was to be taken ahead alone.
// The needs are then without.
func withoutAhead(denied string, charges []Charge, needs []need) (again bool) {
	for i := range needs {
		again = again || needs[i].ahead > 0 && charges[i].Limit.Name == denied
	}
	for i := range needs {
		if again {
			needs[i].ahead = 0
		}
	}
	return again
}

// crossed reports whether units that were taken from leases are of another window than the answer.
func crossed(at int64, charges []Charge, needs []need) bool {
	for i, n := range needs {
		if n.units > 0 && (at < n.since || at >= n.since+charges[i].Limit.withDefaults().windowMS()) {
			return true
		}
	}
	return false
}

// settle ends a call after the decision about what was missing, and returns that about all the charges.
// A decision that the store did not make tells nothing of the limits.
func (l *Leased) settle(ctx context.Context, d Decision, asked time.Time, charges []Charge, needs []need) Decision {
	var locked table.Set
	questions := 0
	for i := range needs {
		locked |= table.SetOf(needs[i].hash)
		if needs[i].missing() > 0 {
			questions++
		}
	}
	tells := d.n == questions && !d.Cached && !d.Fallback
	answers, all := d.parts(), d
	if tells {
		all.grow(len(charges))
	}
	var back []Charge
	l.leases.Lock(locked)
	for i := range needs {
		var answer *part
		if tells && needs[i].missing() > 0 {
			answer, answers = &answers[0], answers[1:]
		}
		if needs[i].lease != nil {
			back = l.release(back, charges[i], &needs[i], answer, &d, asked)
		}
		if tells {
			all.parts()[i] = needs[i].part(charges[i], answer, &d)
		}
	}
	l.leases.Unlock(locked)
	l.giveBack(ctx, back)
	return all
}

// release ends what a call has to do with a lease: what was taken ahead goes into it if d allows, and
// else what was taken from it. What has no place there is added to back.
func (l *Leased) release(back []Charge, charge Charge, n *need, answer *part, d *Decision, asked time.Time) []Charge {
	e, at := &n.lease.Value, d.At.UnixMilli()
	e.calls--
	if n.taking {
		e.taking = false
		if !d.Cached { // a remembered denial tells nothing of what may be taken
			e.ahead = 0
		}
	}
	units, since := n.units, n.since
	if d.Allowed {
		units = 0
	}
	if answer != nil {
		old, born := e.learn(answer.counter, at, asked)
		back = giveUp(back, charge, old, born)
		if n.taking {
			e.ahead = n.ahead
		}
		if d.Allowed {
			units, since = n.ahead, at-e.rule.elapsed(at)
			if units > 0 {
				e.taken = asked
			}
		}
	}
	if l.open.Load() {
		units = e.add(units, since, e.rule.Max/l.cfg.Share)
	}
	return giveUp(back, charge, units, since)
}

// part is the limit's part in the decision about all the charges.
func (n *need) part(charge Charge, answer *part, d *Decision) part {
	if n.lease == nil || answer != nil && !d.Allowed {
		asked := *answer
		asked.cost = n.cost
		return asked
	}
	e := &n.lease.Value
	return part{rule: e.rule, key: charge.Key, cost: n.cost, counter: e.state(d.At.UnixMilli())}
}

// giveUp adds units to what is to be given back.
func giveUp(back []Charge, c Charge, units, since int64) []Charge {
	if units == 0 {
		return back
	}
	c.Cost, c.At, c.Local = units, time.UnixMilli(since), false
	return append(back, c)
}
