package ratelimit

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/holdfast-go/holdfast/ratelimit/internal/storedkey"
	"github.com/holdfast-go/holdfast/ratelimit/internal/table"
)

// counted is a stored counter.
type counted struct {
	value counter
	since int64 // in milliseconds: the start of the window, or the time of the bucket's value
	rule  *rule // nil until it is set
}

// counter brings the counter forward to now, which is not before c.since. It also returns the time since the start of
// the window.
func (c *counted) counter(r *rule, now int64) (_ counter, elapsed int64) {
	if r.bucket() {
		return counter{Cur: r.drain(c.value.Cur, now-c.since)}, 0
	}
	switch elapsed = now - c.since; {
	case elapsed < r.w:
		return c.value, elapsed
	case elapsed < 2*r.w:
		return counter{Prev: c.value.Cur}, elapsed - r.w
	}
	return counter{}, now % r.w
}

func (c *counted) set(r *rule, value counter, at, elapsed int64) {
	c.value, c.since, c.rule = value, at-elapsed, r
}

// expires returns the time from which the counter equals an empty one.
func (c *counted) expires() int64 {
	if c.rule.bucket() {
		return c.since + ceilDiv(c.value.Cur, c.rule.Max)
	}
	return c.since + 2*c.rule.w
}

// compare orders counters by the time they lapse, then by their count. So many new keys evict each other, not the
// counter that all callers share.
func (c *counted) compare(other *counted) int {
	return cmp.Or(cmp.Compare(c.expires(), other.expires()), cmp.Compare(c.value.Cur, other.value.Cur))
}

// known returns the counter that was last charged by exactly this limit.
func known(s *table.Shard[counted], hash uint64, key string, l *Limit) *table.Entry[counted] {
	for i := s.Home(hash); s.Slots[i].Entry != nil; i = s.Next(i) {
		if at := &s.Slots[i]; at.Hash == hash && at.Entry.Value.rule.given == *l && at.Entry.Key == key {
			return at.Entry
		}
	}
	return nil
}

// shared returns the counter that the rule shares with other rules.
func shared(s *table.Shard[counted], hash uint64, key string, r *rule) *table.Entry[counted] {
	for i := s.Home(hash); s.Slots[i].Entry != nil; i = s.Next(i) {
		if at := &s.Slots[i]; at.Hash == hash && at.Entry.Key == key && at.Entry.Value.rule.countsWith(r) {
			return at.Entry
		}
	}
	return nil
}

// MemoryConfig configures a Memory limiter. The zero value works.
type MemoryConfig struct {
	// MaxKeys limits the number of counters, at least 1,000. They are spread randomly over 64 parts of equal size, so
	// set it well above the number of concurrently active keys. If a part is full, the counters that lapse first are
	// dropped and start again from 0. Default: 100,000.
	MaxKeys int
}

// Memory is a Limiter within one process, by its monotonic clock. It also implements driver.Reserver. Make it with
// NewMemory. It is safe for concurrent use. A decision about up to three limits allocates nothing, unless a key is
// new or longer than 64 bytes, or the charges are passed through an interface.
type Memory struct {
	counters *table.Table[counted]
	rules    rules
	start    time.Time // read once, because the monotonic clock never steps back
	startNS  int64
}

const (
	minMemoryKeys  = 1000
	defaultMaxKeys = 100_000
)

// NewMemory returns a Memory limiter.
func NewMemory(cfg MemoryConfig) (*Memory, error) {
	if cfg.MaxKeys == 0 {
		cfg.MaxKeys = defaultMaxKeys
	}
	if cfg.MaxKeys < minMemoryKeys {
		return nil, fmt.Errorf("ratelimit: MemoryConfig.MaxKeys is %d, must be at least %d", cfg.MaxKeys, minMemoryKeys)
	}
	start := time.Now()
	return &Memory{counters: table.New[counted](cfg.MaxKeys), start: start, startNS: start.UnixNano()}, nil
}

// Allow implements Limiter.
func (m *Memory) Allow(ctx context.Context, charges ...Charge) (d Decision, err error) {
	err = m.decide(ctx, &d, 0, true, charges)
	return d, err
}

// Peek returns the decision that Allow would make now, and charges nothing. Its Remaining and Reset are the values
// after the charge, if it would be allowed.
func (m *Memory) Peek(ctx context.Context, charges ...Charge) (d Decision, err error) {
	err = m.decide(ctx, &d, 0, false, charges)
	return d, err
}

// Reserve implements driver.Reserver.
func (m *Memory) Reserve(ctx context.Context, within time.Duration, charges ...Charge) (d Decision, err error) {
	if err := Charges(charges).CheckReserve(within); err != nil {
		if _, invalid := Charges(charges).Normalize(); invalid != nil {
			return Decision{}, invalid
		}
		return Decision{}, err
	}
	err = m.decide(ctx, &d, within, true, charges)
	return d, err
}

// Refund implements Limiter.
func (m *Memory) Refund(ctx context.Context, charges ...Charge) error {
	return m.change(ctx, charges, func(c Charge, r *rule, e *table.Entry[counted], at int64) {
		counter, elapsed := e.Value.counter(r, at)
		since := at
		if !c.At.IsZero() {
			since = c.At.UnixMilli()
		}
		r.refund(&counter, max(c.Cost, 1), since, at)
		e.Value.set(r, counter, at, elapsed)
	})
}

// Reset clears the counters of the charges.
func (m *Memory) Reset(ctx context.Context, charges ...Charge) error {
	return m.change(ctx, charges, func(_ Charge, r *rule, e *table.Entry[counted], at int64) {
		e.Value.set(r, counter{}, at, r.elapsed(at))
	})
}

// Len returns the number of counters, including lapsed ones.
func (m *Memory) Len() int { return m.counters.Len() }

// target is the counter of a charge.
type target struct {
	hash    uint64
	key     string
	rule    *rule
	counter *table.Entry[counted] // nil: nothing counted yet
}

func (m *Memory) decide(ctx context.Context, d *Decision, within time.Duration, take bool, charges []Charge) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if len(charges) == 1 && within == 0 && m.decideOne(d, take, &charges[0]) {
		return nil
	}
	if err := Charges(charges).checkCount(); err != nil {
		return err
	}
	var space [fewParts]target
	targets := space[:]
	var elapsedSpace [fewParts]int64
	elapsed := elapsedSpace[:]
	if len(charges) > fewParts {
		targets, elapsed = make([]target, len(charges)), make([]int64, len(charges))
	}
	targets, elapsed = targets[:len(charges)], elapsed[:len(charges)]
	d.grow(len(charges))

	at := m.clock()
	locked := m.find(charges, targets)
	m.counters.Lock(locked)
	if !m.resolve(charges, targets) {
		m.counters.Unlock(locked)
		*d = Decision{}
		return invalid(charges)
	}
	at = m.upTo(at, targets)
	parts := d.parts()
	for i := range parts {
		p, s := &parts[i], &targets[i]
		p.rule, p.key, p.cost = s.rule, charges[i].Key, max(charges[i].Cost, 1)
		if s.counter == nil {
			elapsed[i] = s.rule.elapsed(at)
		} else {
			p.counter, elapsed[i] = s.counter.Value.counter(s.rule, at)
		}
	}
	d.At = time.UnixMilli(at)
	d.settle(within, take, elapsed)
	if d.taken {
		m.keep(targets, parts, elapsed, at)
	}
	m.counters.Unlock(locked)
	return nil
}

// decideOne is decide for one charge with an existing counter, which is a third cheaper this way. For all other calls
// it reports false and changes nothing.
func (m *Memory) decideOne(d *Decision, take bool, c *Charge) bool {
	if c.Cost < 0 || !storedkey.Short(c.Key) {
		return false
	}
	hash := m.counters.Hash(c.Key)
	at := m.clock()
	shard := m.counters.Shard(hash)
	shard.Lock()
	e := known(shard, hash, c.Key, &c.Limit)
	if e == nil {
		shard.Unlock()
		return false
	}
	if at < e.Value.since { // another call was faster after this one read the clock
		at = m.clock()
	}
	r, cost := e.Value.rule, max(c.Cost, 1)
	counter, elapsed := e.Value.counter(r, at)
	wait := int64(0)
	possible := cost <= r.most
	if possible {
		wait = r.wait(counter, cost, elapsed)
	}
	allowed := possible && wait == 0
	if allowed {
		counter.Cur += cost * r.unit
		if take {
			e.Value.set(r, counter, at, elapsed)
		}
	}
	shard.Unlock() // before filling in d, because other calls wait for the lock

	d.At, d.n, d.Allowed, d.taken = time.UnixMilli(at), 1, true, allowed && take
	if !allowed {
		d.deny(r.Name, ms(wait), !possible)
	}
	p := &d.few[0] // field by field: copying a new part would wait for its stores
	p.rule, p.key, p.cost, p.counter = r, c.Key, cost, counter
	return true
}

// keep stores the counters of an allowed decision.
func (m *Memory) keep(targets []target, parts []part, elapsed []int64, at int64) {
	for i := range targets {
		s := &targets[i]
		if s.counter == nil {
			s.counter = m.counters.Shard(s.hash).Insert(s.hash, s.key, func(c *counted) bool { return c.expires() <= at }, (*counted).compare)
		}
		s.counter.Value.set(s.rule, parts[i].counter, at, elapsed[i])
	}
}

// change calls fn for each charge with a counter, under one lock.
func (m *Memory) change(ctx context.Context, charges []Charge, fn func(c Charge, r *rule, e *table.Entry[counted], at int64)) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := Charges(charges).checkCount(); err != nil {
		return err
	}
	targets := make([]target, len(charges))
	at := m.clock()
	locked := m.find(charges, targets)
	m.counters.Lock(locked)
	defer m.counters.Unlock(locked)
	if !m.resolve(charges, targets) {
		return invalid(charges)
	}
	at = m.upTo(at, targets)
	for i, s := range targets {
		if s.counter != nil {
			fn(charges[i], s.rule, s.counter, at)
		}
	}
	return nil
}

// upTo returns a time that is not before any counter's time: another call may have been faster after this one read
// the clock. The shards are locked.
func (m *Memory) upTo(at int64, targets []target) int64 {
	for i := range targets {
		if e := targets[i].counter; e != nil && at < e.Value.since {
			return m.clock()
		}
	}
	return at
}

// find fills in the hash and the key of each target, and returns the set of their shards.
func (m *Memory) find(charges []Charge, targets []target) (s table.Set) {
	for i := range targets {
		key := charges[i].Key
		if !storedkey.Short(key) {
			key = storedkey.Encode(key)
		}
		hash := m.counters.Hash(key)
		targets[i].hash, targets[i].key = hash, key
		s |= table.SetOf(hash)
	}
	return s
}

// resolve fills in the rule and the counter of each target. It reports false if a charge is invalid.
// The shards are locked.
func (m *Memory) resolve(charges []Charge, targets []target) bool {
	for i := range targets {
		c, s := &charges[i], &targets[i]
		if c.Cost < 0 {
			return false
		}
		for _, other := range targets[:i] {
			if other.hash == s.hash && other.key == s.key && other.rule.Name == c.Limit.Name {
				return false
			}
		}
		shard := m.counters.Shard(s.hash)
		if s.counter = known(shard, s.hash, s.key, &c.Limit); s.counter != nil {
			s.rule = s.counter.Value.rule
			continue
		}
		if s.rule = m.rules.of(c.Limit); s.rule == nil {
			return false
		}
		s.counter = shared(shard, s.hash, s.key, s.rule)
	}
	return true
}

// invalid returns the error of rejected charges.
func invalid(charges []Charge) error {
	_, err := Charges(charges).Normalize()
	if err == nil {
		err = fmt.Errorf("%w: two keys have the same stored form", ErrInvalid)
	}
	return err
}

// clock returns the time in milliseconds. It never steps back.
func (m *Memory) clock() int64 {
	return (m.startNS + int64(time.Since(m.start))) / int64(time.Millisecond)
}
