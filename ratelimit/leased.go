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

// Leases.
//
// A [Leased] limiter avoids most round trips for a busy limit. A process takes extra units ahead in a round trip that
// it makes anyway, and spends them in memory. After 100 to 200 ms it refunds the rest. If the units were used up
// sooner, it takes twice as many the next time, but never more than a hundredth of the units that the limit has left
// (LeasedConfig.Share). So the last hundred units are taken one by one, by whichever process needs them.
//
// The processes never spend more than the limit admits, by the store's clock and however many processes there are.
// Two rules ensure this:
//
//	1. A unit is either spent once or refunded, never both.
//	2. A unit is spent in the window to which the store charged it. A process computes the store's
//	   time from the time of its call and the answer, with a clock that runs a hundredth too fast, so it
//	   stops milliseconds early.
//
// So at any time the store has charged at least the spent units, in the same window. If a [FixedWindow] admits the
// charges, it admits the spending. The same holds for a [SlidingWindow], because the weight of the previous window
// only falls between the charge and the moment when the unit is spent.
//
// A [TokenBucket] regains tokens in between, so units spent later would be a burst beyond the bucket. A bucket is
// therefore never leased; the store decides each time. The same holds for a limit with a Max below Share.
//
// The disadvantage: leased units are unavailable to others for a while. While a process holds the last units of a
// limit, others are denied, for at most 200 ms, and for a second if they remember the denial. RetryAfter of such a
// denial is the time until the limit regains units, not until other processes refund theirs. If a process dies, its
// units are lost until they lapse, at the latest with the next window. For each limit and key these are at most Max /
// Share, as many again in a running call, and the charges of its calls. A lost answer or refund also loses units. The
// metric holdfast.ratelimit.leased shows the leased units.
//
// Three events let the leased units count beyond the limit, once: a store that loses its memory or whose clock is
// changed, a Reset, and different Max values for the same name, window and key.

const (
	// leaseHold is how long units are held before they are refunded; at most twice as long. A lease that is used up
	// sooner is doubled, so a busy lease costs ten to twenty round trips a second.
	leaseHold = 100 * time.Millisecond
	// driftShare is the allowed relative drift between the clocks of process and store: hundreds of times the drift
	// of a clock that is being corrected.
	driftShare = 100
	// clockSlack is the number of milliseconds lost by rounding twice.
	clockSlack = 2
)

const (
	defaultShare = 100
	// maxLeases limits the leased limits and keys; for others the store decides.
	maxLeases = 10_000
	// giveBackTimeout limits a refund, and so the end of Run.
	giveBackTimeout = 5 * time.Second
)

// LeasedConfig configures a Leased limiter. The zero value works.
type LeasedConfig struct {
	// Share limits the units taken ahead to this part of the units that a limit has left, so that a process that dies
	// loses no more. For a limit with a Max below Share the store decides each time, and also for the last Share
	// units of any limit. At least 1. Default: 100, for one in a hundred.
	Share int64
	// MeterProvider is for the metric holdfast.ratelimit.leased. Default: the global one.
	MeterProvider metric.MeterProvider
}

// Leased is a Limiter that takes units of busy limits ahead from a store shared by many processes, and spends them in
// memory. The comment at the top of this file describes its guarantees. It also implements driver.Reserver. Make it
// with NewLeased, and call Run. It is safe for concurrent use.
type Leased struct {
	store  Limiter
	cfg    LeasedConfig
	meter  metric.Meter
	held   metric.Int64ObservableUpDownCounter // the sum of all Leased limiters of the process
	leases *table.Table[lease]
	rules  rules
	open   atomic.Bool // while Run runs
}

// lease holds the leased units of one limit and key.
type lease struct {
	counted           // the store's counter as of the last answer
	units   int64     // charged to that window at the store, and not yet spent
	at      int64     // the store's time in the last answer, in milliseconds
	asked   time.Time // when the call of that answer started; zero before the first
	ahead   int64     // the number of units last taken ahead
	taken   time.Time // when the call for these units started
	taking  bool      // a running call takes units ahead
	calls   int       // running calls, which may return units
}

// NewLeased returns a Leased limiter on a store, usually a ratelimitredis.Limiter.
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
	held, err := meter.Int64ObservableUpDownCounter("holdfast.ratelimit.leased",
		metric.WithDescription("Units by limit taken ahead and not yet spent. If the process dies, they are lost until they lapse."), metric.WithUnit("{unit}"))
	if err != nil {
		return nil, fmt.Errorf("ratelimit: %w", err)
	}
	return &Leased{store: store, cfg: cfg, meter: meter, held: held, leases: table.New[lease](math.MaxInt)}, nil
}

// Run refunds units that were not spent in time. When ctx ends it refunds the rest, within 10 s. Units that the store
// has not taken back by then stay charged until they lapse. While Run does not run, the store decides every call and
// nothing is taken ahead. Run returns nil, or an error if it is already running or the meter rejects the metric.
func (l *Leased) Run(ctx context.Context) error {
	if !l.open.CompareAndSwap(false, true) {
		return errors.New("ratelimit: Run of a Leased limiter is running already")
	}
	registered, err := l.meter.RegisterCallback(l.observe, l.held)
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

// Refund implements Limiter by the store.
func (l *Leased) Refund(ctx context.Context, charges ...Charge) error {
	return l.store.Refund(ctx, charges...)
}

// Reserve implements driver.Reserver by the store, because token buckets are not leased.
func (l *Leased) Reserve(ctx context.Context, within time.Duration, charges ...Charge) (Decision, error) {
	r, ok := l.store.(reserver)
	if !ok {
		return Decision{}, fmt.Errorf("%w: the limiter cannot reserve", ErrInvalid)
	}
	return r.Reserve(ctx, within, charges...)
}

// Allow implements Limiter. It calls the store unless leased units cover all charges.
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

// observe reports the leased units.
func (l *Leased) observe(_ context.Context, o metric.Observer) error {
	units := map[string]int64{}
	l.leases.Each(func(_ string, e *lease) bool {
		units[e.rule.Name] += e.units
		return true
	})
	for name, n := range units {
		o.ObserveInt64(l.held, n, metric.WithAttributes(attribute.String("limit", name)))
	}
	return nil
}

// sweep refunds units that were held too long, or all units if Run ends, and removes idle leases.
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

// giveBack refunds units that were not spent. After a failed refund the units stay charged until they lapse, because
// a retry could refund them twice.
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

// charged reports whether the charges contain the limit and key of c.
func charged(charges []Charge, c Charge) bool {
	return slices.ContainsFunc(charges, func(o Charge) bool { return o.Limit.Name == c.Limit.Name && o.Key == c.Key })
}

// need is the demand of one call for one limit and key.
type need struct {
	hash  uint64
	cost  int64
	lease *table.Entry[lease] // nil: the store decides about this limit and key each time

	units  int64 // the part of the cost covered by the lease
	since  int64 // the start of their window
	ahead  int64 // units to take beyond the cost
	taking bool  // this call takes units ahead
}

// missing returns the units to charge at the store.
func (n *need) missing() int64 { return n.cost - n.units + n.ahead }

// outcome is the result of spend.
type outcome int

const (
	notLeased outcome = iota // the store decides about all charges
	toAsk                    // units are missing
	spent                    // leased units covered all charges; the decision is made
)

// spend takes the units of all charges from the leases and decides, if the leases cover them. Otherwise it takes the
// units that are there.
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

// resolve finds or makes the leases of the charges. It reports false if the store must decide about all charges,
// because they are invalid or a cost never fits.
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

// take takes the lease's part of the cost. Only one call at a time takes more from the store than it needs.
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

// ask makes the store decide about the missing units.
func (l *Leased) ask(ctx context.Context, charges []Charge, needs []need) (Decision, error) {
	asked, returned := time.Now(), false
	defer func() {
		if !returned { // the store panicked: return the units and let other calls take again
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

// missing returns the charges for the store.
func missing(charges []Charge, needs []need) []Charge {
	asked := make([]Charge, 0, len(charges))
	for i, c := range charges {
		if c.Cost = needs[i].missing(); c.Cost > 0 {
			asked = append(asked, c)
		}
	}
	return asked
}

// withoutAhead reports whether the limit that denied may have denied only the units ahead. It then sets all units
// ahead to zero.
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

// crossed reports whether units from leases belong to another window than the answer.
func crossed(at int64, charges []Charge, needs []need) bool {
	for i, n := range needs {
		if n.units > 0 && (at < n.since || at >= n.since+charges[i].Limit.withDefaults().windowMS()) {
			return true
		}
	}
	return false
}

// settle ends a call after the store's decision about the missing units, and returns the decision about all charges.
// A decision that the store did not make contains no state of the limits.
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

// release ends the use of a lease by a call. If d allows, the units taken ahead go into the lease; otherwise the
// units taken from it return. Units without room there are added to back.
func (l *Leased) release(back []Charge, charge Charge, n *need, answer *part, d *Decision, asked time.Time) []Charge {
	e, at := &n.lease.Value, d.At.UnixMilli()
	e.calls--
	if n.taking {
		e.taking = false
		if !d.Cached { // a cached denial does not show how much may be taken
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

// part returns the limit's part of the decision about all charges.
func (n *need) part(charge Charge, answer *part, d *Decision) part {
	if n.lease == nil || answer != nil && !d.Allowed {
		asked := *answer
		asked.cost = n.cost
		return asked
	}
	e := &n.lease.Value
	return part{rule: e.rule, key: charge.Key, cost: n.cost, counter: e.state(d.At.UnixMilli())}
}

// giveUp adds units to the refunds.
func giveUp(back []Charge, c Charge, units, since int64) []Charge {
	if units == 0 {
		return back
	}
	c.Cost, c.At, c.Local = units, time.UnixMilli(since), false
	return append(back, c)
}

// clock returns a time that the store's clock has not passed, some milliseconds ahead of it.
func (l *lease) clock(now time.Time) int64 {
	// The monotonic clock stops while a machine is suspended; the wall clock may be set back.
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

// next returns the number of units to take ahead: twice the last number if those did not last, and at most the share
// of the units that are left. The first call takes nothing ahead, and neither do the last units.
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

// learn stores the store's counter of an answer. It returns units of another window, with the start of that window,
// to be refunded, because a sliding window still weighs them.
func (l *lease) learn(c counter, answered int64, asked time.Time) (units, since int64) {
	elapsed := l.rule.elapsed(answered)
	if answered-elapsed != l.since {
		units, since, l.units = l.units, l.since, 0
	}
	l.set(l.rule, c, answered, elapsed)
	l.at, l.asked = answered, asked
	return units, since
}

// add puts units of a window into the lease, and returns the units without room, to be refunded.
func (l *lease) add(units, since, most int64) (back int64) {
	if since != l.since {
		return units
	}
	l.units += units
	back = max(0, l.units-most)
	l.units -= back
	return back
}

// state returns the store's counter at a time, without the leased units.
func (l *lease) state(at int64) counter {
	c, _ := l.counter(l.rule, max(at, l.since))
	c.Cur = max(0, c.Cur-l.units)
	return c
}
