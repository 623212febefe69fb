package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// MemoryConfig configures a Memory limiter. The zero value works.
type MemoryConfig struct {
	// MaxKeys bounds the number of counters kept, at least 1,000. 0 means 100,000.
	// They are spread by chance over 64 parts of equal size, so set it well above
	// the number of keys that are active at once: when a part is full, those that
	// lapse soonest are dropped, and start afresh.
	MaxKeys int

	// Now is the clock, for tests that move time by hand; see ratelimittest.Clock.
	// Set back, counters go on with what they hold. Nil means the process's own,
	// which never steps back.
	Now func() time.Time
}

// Memory is a Limiter within one process. Make it with NewMemory. It is safe for
// concurrent use. A decision about up to three limits allocates nothing unless a
// key is new, longer than 64 bytes, or the charges are passed through an
// interface.
type Memory struct {
	counters *table[counted]
	rules    rules
	now      func() time.Time
	start    time.Time // read once: its monotonic clock never steps back
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
	return &Memory{counters: newTable[counted](cfg.MaxKeys), now: cfg.Now, start: start, startNS: start.UnixNano()}, nil
}

// Allow implements Limiter.
func (m *Memory) Allow(ctx context.Context, charges ...Charge) (d Decision, err error) {
	err = m.decide(ctx, &d, 0, true, charges)
	return d, err
}

// Peek returns the decision that Allow would make now, and charges nothing. Its
// Remaining and Reset are those after the charge if that would be allowed.
func (m *Memory) Peek(ctx context.Context, charges ...Charge) (d Decision, err error) {
	err = m.decide(ctx, &d, 0, false, charges)
	return d, err
}

// Reserve implements Reserver.
func (m *Memory) Reserve(ctx context.Context, within time.Duration, charges ...Charge) (d Decision, err error) {
	if err := CheckReserve(within, charges); err != nil {
		if _, invalid := Normalize(charges); invalid != nil {
			return Decision{}, invalid
		}
		return Decision{}, err
	}
	err = m.decide(ctx, &d, within, true, charges)
	return d, err
}

// Refund implements Limiter.
func (m *Memory) Refund(ctx context.Context, charges ...Charge) error {
	return m.change(ctx, charges, func(c Charge, r *rule, e *entry[counted], at int64) {
		counter, elapsed := e.value.counter(r, at)
		since := at
		if !c.At.IsZero() {
			since = c.At.UnixMilli()
		}
		r.refund(&counter, max(c.Cost, 1), since, at)
		e.value.set(r, counter, at, elapsed)
	})
}

// Reset forgets what was charged to the limits and keys of the charges.
func (m *Memory) Reset(ctx context.Context, charges ...Charge) error {
	return m.change(ctx, charges, func(_ Charge, r *rule, e *entry[counted], at int64) {
		e.value.set(r, Counter{}, at, r.elapsed(at))
	})
}

// Len returns the number of counters kept, lapsed ones included.
func (m *Memory) Len() int { return m.counters.len() }

// seat is where the counter of a charge is.
type seat struct {
	hash    uint64
	key     string
	rule    *rule
	counter *entry[counted] // nil: nothing was counted yet
}

func (m *Memory) decide(ctx context.Context, d *Decision, within time.Duration, take bool, charges []Charge) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if len(charges) == 1 && within == 0 && m.decideOne(d, take, &charges[0]) {
		return nil
	}
	if len(charges) == 0 || len(charges) > MaxCharges {
		_, err := Normalize(charges)
		return err
	}
	var space [fewParts]seat
	seats := space[:]
	var elapsedSpace [fewParts]int64
	elapsed := elapsedSpace[:]
	if len(charges) > fewParts {
		seats, elapsed = make([]seat, len(charges)), make([]int64, len(charges))
	}
	seats, elapsed = seats[:len(charges)], elapsed[:len(charges)]
	d.grow(len(charges))

	at := m.clock()
	locked := m.find(charges, seats)
	m.counters.lock(locked)
	if !m.sit(charges, seats) {
		m.counters.unlock(locked)
		*d = Decision{}
		return invalid(charges)
	}
	at = m.upTo(at, seats)
	parts := d.parts()
	for i := range parts {
		p, s := &parts[i], &seats[i]
		p.rule, p.key, p.cost = s.rule, charges[i].Key, max(charges[i].Cost, 1)
		if s.counter == nil {
			elapsed[i] = s.rule.elapsed(at)
		} else {
			p.counter, elapsed[i] = s.counter.value.counter(s.rule, at)
		}
	}
	d.At = time.UnixMilli(at)
	d.settle(within, take, elapsed)
	if d.taken {
		m.keep(seats, parts, elapsed, at)
	}
	m.counters.unlock(locked)
	return nil
}

// decideOne is decide for one charge of a counter that is there, which costs a
// third less this way. It reports false, and changes nothing, for all others.
func (m *Memory) decideOne(d *Decision, take bool, c *Charge) bool {
	if c.Cost < 0 || !keepable(c.Key) {
		return false
	}
	hash := m.counters.hash(c.Key)
	at := m.clock()
	shard := m.counters.shard(hash)
	shard.mu.Lock()
	e := known(shard, hash, c.Key, &c.Limit)
	if e == nil {
		shard.mu.Unlock()
		return false
	}
	if at < e.value.since {
		at = m.clock()
		e.value.notAfter(at)
	}
	r, cost := e.value.rule, max(c.Cost, 1)
	counter, elapsed := e.value.counter(r, at)
	wait := int64(0)
	possible := cost <= r.most
	if possible {
		wait = r.wait(counter, cost, elapsed)
	}
	allowed := possible && wait == 0
	if allowed {
		counter.Cur += cost * r.unit
		if take {
			e.value.set(r, counter, at, elapsed)
		}
	}
	shard.mu.Unlock() // before d is filled in: others wait for the lock alone

	d.At, d.n, d.Allowed, d.taken = time.UnixMilli(at), 1, true, allowed && take
	if !allowed {
		d.deny(r.Name, ms(wait), !possible)
	}
	p := &d.few[0] // field by field: copying a part just made would wait for its stores
	p.rule, p.key, p.cost, p.counter = r, c.Key, cost, counter
	return true
}

// keep stores the counters of an allowed decision.
func (m *Memory) keep(seats []seat, parts []part, elapsed []int64, at int64) {
	for i := range seats {
		s := &seats[i]
		if s.counter == nil {
			s.counter = m.counters.shard(s.hash).insert(s.hash, s.key, func(c *counted) bool { return c.expires() <= at }, (*counted).compare)
		}
		s.counter.value.set(s.rule, parts[i].counter, at, elapsed[i])
	}
}

// change calls fn for each charge that has a counter, all together.
func (m *Memory) change(ctx context.Context, charges []Charge, fn func(c Charge, r *rule, e *entry[counted], at int64)) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if len(charges) == 0 || len(charges) > MaxCharges {
		_, err := Normalize(charges)
		return err
	}
	seats := make([]seat, len(charges))
	at := m.clock()
	locked := m.find(charges, seats)
	m.counters.lock(locked)
	defer m.counters.unlock(locked)
	if !m.sit(charges, seats) {
		return invalid(charges)
	}
	at = m.upTo(at, seats)
	for i, s := range seats {
		if s.counter != nil {
			fn(charges[i], s.rule, s.counter, at)
		}
	}
	return nil
}

// upTo returns a time that no counter is ahead of. Another call may have overtaken
// this one since it read the clock; else the clock was set back. The shards are
// locked.
func (m *Memory) upTo(at int64, seats []seat) int64 {
	for i := range seats {
		if e := seats[i].counter; e != nil && at < e.value.since {
			at = m.clock()
			break
		}
	}
	for i := range seats {
		if e := seats[i].counter; e != nil {
			e.value.notAfter(at)
		}
	}
	return at
}

// find fills in the hash and the key of each seat, and returns the shards they
// are in.
func (m *Memory) find(charges []Charge, seats []seat) (s set) {
	for i := range seats {
		key := charges[i].Key
		if !keepable(key) {
			key = EncodeKey(key)
		}
		hash := m.counters.hash(key)
		seats[i].hash, seats[i].key = hash, key
		s |= setOf(hash)
	}
	return s
}

// sit fills in the rule and the entry of each seat. It reports false if a charge
// is invalid. The shards are locked.
func (m *Memory) sit(charges []Charge, seats []seat) bool {
	for i := range seats {
		c, s := &charges[i], &seats[i]
		if c.Cost < 0 {
			return false
		}
		for _, other := range seats[:i] {
			if other.hash == s.hash && other.key == s.key && other.rule.Name == c.Limit.Name {
				return false
			}
		}
		shard := m.counters.shard(s.hash)
		if s.counter = known(shard, s.hash, s.key, &c.Limit); s.counter != nil {
			s.rule = s.counter.value.rule
			continue
		}
		if s.rule = m.rules.of(c.Limit); s.rule == nil {
			return false
		}
		s.counter = kindred(shard, s.hash, s.key, s.rule)
	}
	return true
}

// invalid says what is wrong with charges that were refused.
func invalid(charges []Charge) error {
	_, err := Normalize(charges)
	if err == nil {
		err = fmt.Errorf("%w: two keys are the same when hashed", ErrInvalid)
	}
	return err
}

func (m *Memory) clock() int64 {
	if m.now != nil {
		return m.now().UnixMilli()
	}
	return (m.startNS + int64(time.Since(m.start))) / int64(time.Millisecond)
}

var errNilLimiter = errors.New("ratelimit: limiter is nil")
