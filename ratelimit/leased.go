package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/telemetry"
	"github.com/holdfast-go/holdfast/ratelimit/internal/bounds"
	"github.com/holdfast-go/holdfast/ratelimit/internal/table"
)

// Units taken ahead.
//
// A [Leased] limiter spares a busy limit most of its round trips. A process takes units ahead in a trip
// that it makes anyway, spends them in memory, and gives back after 100 to 200 ms what is left. Twice as
// many are taken the next time if they were used up sooner, but never more than a hundredth of what the
// limit has left (LeasedConfig.Share): the last hundred units are taken one by one, whoever needs them.
//
// What is spent is never more than the limit admits, by the store's clock and however many processes
// there are, because of two rules:
//
//  1. A unit is spent once, or given back, and not both.
//  2. A unit is spent in the window to which it was charged at the store. A process reckons the store's
//     time from an answer, a hundredth too fast and from when it asked, so it stops milliseconds early.
//
// So the store has charged at any time at least what was spent, and in the same window. A [FixedWindow]
// that admits the one admits the other. So does a [SlidingWindow], since the weight of the previous
// window only falls between the charge and the moment when the unit is spent.
//
// A [TokenBucket] regains tokens in between: units that are spent later would be a burst beyond it. It
// is never leased; the store is asked each time. So it is for a limit whose Max is below Share.
//
// The price is units that nobody can have for a while. Others are denied while a process holds the last
// of a limit, for 200 ms at most, and for a second if they remember the denial. RetryAfter of such a
// denial tells when the limit regains units, not when the others give theirs back. A process that dies
// strands what it holds until that lapses, at the latest with the window after this one: of each limit
// and key at most Max / Share, as much again in a trip under way, and what its calls were charged. So
// does an answer or a refund that is lost. The gauge holdfast.ratelimit.leased tells what is held.
//
// Three things let the units that are held count beyond the limit, once: a store that loses its memory
// or whose clock is set, a Reset, and different Max under one name, window and key.

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

const (
	defaultShare = 100
	// maxLeases bounds the limits and keys of which units are held; others are asked of the store.
	maxLeases = 10_000
	// giveBackTimeout bounds giving back, and with it the end of Run.
	giveBackTimeout = 5 * time.Second
)

// LeasedConfig configures a Leased limiter. The zero value works.
type LeasedConfig struct {
	// Share bounds what is taken ahead: at most this part of the units that a limit has left, so that a
	// process which dies strands no more. A limit whose Max is below Share is asked of the store each
	// time, and so are the last Share units of any limit. At least 1. Default: 100, for one in a hundred.
	Share int64
	// MeterProvider is for the gauge holdfast.ratelimit.leased. Default: the global one.
	MeterProvider metric.MeterProvider
}

// Leased is a Limiter that takes units of busy limits ahead from a store that many processes share, and
// spends them in memory. See the package's documentation for what is promised. It implements
// driver.Reserver too. Make it with NewLeased, and run it. It is safe for concurrent use.
type Leased struct {
	store  Limiter
	cfg    LeasedConfig
	meter  metric.Meter
	gauge  metric.Int64ObservableGauge
	leases *table.Table[lease]
	rules  rules
	open   atomic.Bool // Run runs
}

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

// NewLeased returns a Leased limiter on a store, which is a ratelimitredis.Limiter for all but tests.
func NewLeased(store Limiter, cfg LeasedConfig) (*Leased, error) {
	var errs []error
	if store == nil {
		errs = append(errs, errNilLimiter)
	}
	if cfg.Share < 0 {
		errs = append(errs, fmt.Errorf("ratelimit: LeasedConfig.Share is %d, must not be negative", cfg.Share))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if cfg.Share == 0 {
		cfg.Share = defaultShare
	}
	meter := telemetry.New("github.com/holdfast-go/holdfast/ratelimit", nil, cfg.MeterProvider).Meter
	gauge, err := meter.Int64ObservableGauge("holdfast.ratelimit.leased",
		metric.WithDescription("Units by limit that were taken ahead and not spent: a process that dies strands them until they lapse."), metric.WithUnit("{unit}"))
	if err != nil {
		return nil, fmt.Errorf("ratelimit: %w", err)
	}
	return &Leased{store: store, cfg: cfg, meter: meter, gauge: gauge, leases: table.New[lease](math.MaxInt)}, nil
}

// Run gives back what was not spent in time, and all that is left when ctx ends, within 10 s: what the
// store has not taken back by then stays charged until it lapses. While it does not run every call asks
// the store and nothing is taken ahead. It returns nil, or an error if it runs already or if the meter
// refuses the gauge.
func (l *Leased) Run(ctx context.Context) error {
	if !l.open.CompareAndSwap(false, true) {
		return errors.New("ratelimit: Run of a Leased limiter is running already")
	}
	registered, err := l.meter.RegisterCallback(l.observe, l.gauge)
	if err != nil {
		l.open.Store(false)
		return fmt.Errorf("ratelimit: %w", err)
	}
	for runloop.Sleep(ctx, leaseHold) == nil {
		l.sweep(ctx)
	}
	l.open.Store(false)
	l.sweep(ctx)
	if err := registered.Unregister(); err != nil {
		return fmt.Errorf("ratelimit: %w", err)
	}
	return nil
}

// Ready returns nil while Run runs.
func (l *Leased) Ready(context.Context) error {
	if !l.open.Load() {
		return errors.New("ratelimit: Run of a Leased limiter is not running")
	}
	return nil
}

// Refund implements Limiter: it asks the store.
func (l *Leased) Refund(ctx context.Context, charges ...Charge) error {
	return l.store.Refund(ctx, charges...)
}

// Reserve implements driver.Reserver: it asks the store, since token buckets are not leased.
func (l *Leased) Reserve(ctx context.Context, within time.Duration, charges ...Charge) (Decision, error) {
	r, ok := l.store.(reserver)
	if !ok {
		return Decision{}, fmt.Errorf("%w: the limiter cannot reserve", ErrInvalid)
	}
	return r.Reserve(ctx, within, charges...)
}

// Allow implements Limiter. It asks the store unless all the charges are covered by units that are held.
func (l *Leased) Allow(ctx context.Context, charges ...Charge) (d Decision, err error) {
	if err := ctx.Err(); err != nil {
		return Decision{}, err
	}
	if !l.open.Load() || len(charges) == 0 || len(charges) > bounds.Charges {
		return l.store.Allow(ctx, slices.Clone(charges)...)
	}
	var space [fewParts]need
	needs := space[:]
	if len(charges) > fewParts {
		needs = make([]need, len(charges))
	}
	needs = needs[:len(charges)]
	switch l.spend(&d, charges, needs) {
	case spent:
		return d, nil
	case toAsk:
		return l.ask(ctx, slices.Clone(charges), slices.Clone(needs))
	}
	return l.store.Allow(ctx, slices.Clone(charges)...)
}

// observe collects the gauge.
func (l *Leased) observe(_ context.Context, o metric.Observer) error {
	held := map[string]int64{}
	l.leases.Each(func(_ string, e *lease) bool {
		held[e.rule.Name] += e.units
		return true
	})
	for name, units := range held {
		o.ObserveInt64(l.gauge, units, metric.WithAttributes(attribute.String("limit", name)))
	}
	return nil
}

// sweep gives back what was held for too long, or all units if Run ends, and forgets idle leases.
func (l *Leased) sweep(ctx context.Context) {
	var back []Charge
	open, now := l.open.Load(), time.Now()
	l.leases.Each(func(key string, e *lease) bool {
		idle := now.Sub(e.asked)
		if e.units > 0 && (now.Sub(e.taken) >= leaseHold || !open) {
			back = append(back, Charge{Limit: e.rule.given, Key: key, Cost: e.units, At: time.UnixMilli(e.since)})
			e.units = 0
		}
		return e.calls > 0 || e.units > 0 || idle < 2*leaseHold && open
	})
	l.giveBack(ctx, back)
}

// giveBack refunds units that were not spent. What the store cannot take stays charged until it lapses:
// a second try could give back what was given back already.
func (l *Leased) giveBack(ctx context.Context, back []Charge) {
	if len(back) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), giveBackTimeout)
	defer cancel()
	for len(back) > 0 {
		n := 1
		for n < min(len(back), bounds.Charges) && !charged(back[:n], back[n]) {
			n++
		}
		_ = l.store.Refund(ctx, back[:n]...)
		back = back[n:]
	}
}

// charged reports whether the limit and key of c are among the charges.
func charged(charges []Charge, c Charge) bool {
	return slices.ContainsFunc(charges, func(o Charge) bool { return o.Limit.Name == c.Limit.Name && o.Key == c.Key })
}

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
