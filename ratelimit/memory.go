package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"
	"time"
)

// MemoryConfig configures a Memory limiter. The zero value works.
type MemoryConfig struct {
	// MaxKeys bounds the number of counters kept, at least 1,000. 0 means 100,000.
	// They are spread by chance over 64 parts of equal size, so set it well above
	// the number of keys that are active at once: when a part is full, those that
	// lapse soonest are dropped, and start afresh.
	MaxKeys int
}

// Memory is a Limiter within one process. Make it with NewMemory. It is safe for
// concurrent use.
type Memory struct {
	shards [shardCount]shard
	seed   maphash.Seed
	start  time.Time // read once: its monotonic clock never steps back
}

const (
	shardCount     = 64
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
	m := &Memory{seed: maphash.MakeSeed(), start: time.Now()}
	for i := range m.shards {
		m.shards[i] = shard{entries: map[entryKey]entry{}, limit: cfg.MaxKeys / shardCount}
	}
	return m, nil
}

// Allow implements Limiter.
func (m *Memory) Allow(ctx context.Context, charges ...Charge) (Decision, error) {
	charges, err := Normalize(charges)
	if err != nil {
		return Decision{}, err
	}
	return m.decide(ctx, 0, true, charges)
}

// Peek returns the decision that Allow would make now, and charges nothing. Its
// Remaining and Reset are those after the charge if that would be allowed.
func (m *Memory) Peek(ctx context.Context, charges ...Charge) (Decision, error) {
	charges, err := Normalize(charges)
	if err != nil {
		return Decision{}, err
	}
	d, err := m.decide(ctx, 0, false, charges)
	d.Charges = nil
	return d, err
}

// Reserve implements Reserver.
func (m *Memory) Reserve(ctx context.Context, within time.Duration, charges ...Charge) (Decision, error) {
	charges, err := Normalize(charges)
	if err != nil {
		return Decision{}, err
	}
	if err := CheckReserve(within, charges); err != nil {
		return Decision{}, err
	}
	return m.decide(ctx, within, true, charges)
}

func (m *Memory) decide(ctx context.Context, within time.Duration, take bool, charges []Charge) (Decision, error) {
	if err := ctx.Err(); err != nil {
		return Decision{}, err
	}
	var d Decision
	m.locked(charges, func(at time.Time, counters []Counter) bool {
		d = Decide(at, within, charges, counters)
		return take && d.Allowed
	})
	return d, nil
}

// Refund implements Limiter.
func (m *Memory) Refund(ctx context.Context, charges ...Charge) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	charges, err := Normalize(charges)
	if err != nil {
		return err
	}
	m.locked(charges, func(at time.Time, counters []Counter) bool {
		for i, c := range charges {
			giveBack(at, c, &counters[i])
		}
		return true
	})
	return nil
}

// locked calls fn with the counters of the charges while nobody else can reach
// them, and keeps what fn made of them if it returns true. Shards are locked in
// their order, so that no two calls wait for each other.
func (m *Memory) locked(charges []Charge, fn func(at time.Time, counters []Counter) bool) {
	var keySpace [MaxCharges]entryKey
	var counterSpace [MaxCharges]Counter
	var homeSpace, orderSpace [MaxCharges]int
	keys, counters, homes := keySpace[:len(charges)], counterSpace[:len(charges)], homeSpace[:len(charges)]
	for i, c := range charges {
		keys[i] = keyOf(c)
		homes[i] = int(maphash.Comparable(m.seed, keys[i]) % shardCount)
	}
	order := append(orderSpace[:0], homes...)
	slices.Sort(order)
	order = slices.Compact(order)
	for _, i := range order {
		m.shards[i].mu.Lock()
		defer m.shards[i].mu.Unlock()
	}

	at := m.now() // after the locks: time never runs back between two decisions on a key
	for i, c := range charges {
		counters[i] = m.shards[homes[i]].entries[keys[i]].counter(c.Limit, at.UnixMilli())
	}
	if !fn(at, counters) {
		return
	}
	for i, c := range charges {
		m.shards[homes[i]].store(keys[i], counters[i], c.Limit, at.UnixMilli())
	}
}

// Len returns the number of counters kept, lapsed ones included.
func (m *Memory) Len() int {
	n := 0
	for i := range m.shards {
		m.shards[i].mu.Lock()
		n += len(m.shards[i].entries)
		m.shards[i].mu.Unlock()
	}
	return n
}

func (m *Memory) now() time.Time {
	return time.UnixMilli(m.start.Add(time.Since(m.start)).UnixMilli())
}

var errNilLimiter = errors.New("ratelimit: limiter is nil")
