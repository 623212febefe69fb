package ratelimit

import (
	"cmp"
	"sync/atomic"
	"time"
)

// DenyCache remembers for a second what a store denied, or for less if the store
// would admit it sooner, so that a flood of denied requests costs one round trip a
// second. It serves those who implement Limiter on a distant store. It is safe for
// concurrent use.
//
// A denial stands for the very limit, key and cost that were denied: a raised Max
// or a lower cost is asked about. Units that another process gives back are seen
// when the second is over.
type DenyCache struct {
	denials *table[denial]
	start   time.Time
	forgot  atomic.Int64 // when Forget was called last, since start
}

type denial struct {
	rule    *rule
	cost    int64
	counter counted
	at      int64         // by the store's clock, in milliseconds
	wait    int64         // from at, in milliseconds
	asked   time.Duration // by our clock, since start: not after at
}

// longestDenial bounds how long a denial is remembered. Units that were taken for
// a moment only, such as those of replays, may come back in any process.
const longestDenial = time.Second

// NewDenyCache returns a cache of at most so many denials, at least 64.
func NewDenyCache(most int) *DenyCache {
	return &DenyCache{denials: newTable[denial](most), start: time.Now()}
}

// Find fills in d, which must be empty, with the denial of the charges if a limit
// among them is known to deny. The charges need not be normalized.
func (c *DenyCache) Find(charges []Charge, d *Decision) (found bool) {
	now := time.Since(c.start)
	for i := range charges {
		c.find(&charges[i], now, d)
	}
	d.Cached = d.n > 0
	return d.Cached
}

// find adds to d what is known about one charge.
func (c *DenyCache) find(charge *Charge, now time.Duration, d *Decision) {
	if charge.Cost < 0 { // invalid: not ours to answer
		return
	}
	key := charge.Key
	if !keepable(key) {
		key = EncodeKey(key)
	}
	hash, cost := c.denials.hash(key), max(charge.Cost, 1)
	s := c.denials.shard(hash)
	if s.empty() {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := s.home(hash); s.slots[i].entry != nil; i = s.next(i) {
		e := s.slots[i].entry
		if s.slots[i].hash != hash || e.value.cost != cost || e.value.rule.given != charge.Limit || e.key != key {
			continue
		}
		if now >= e.value.ends() {
			s.remove(i)
		} else {
			e.value.addTo(d, charge.Key, now)
		}
		return
	}
}

func (d *denial) addTo(to *Decision, key string, now time.Duration) {
	passed := int64((now - d.asked) / time.Millisecond)
	at, wait := d.at+passed, d.wait-passed
	if wait <= 0 || to.n == fewParts {
		return
	}
	p := &to.few[to.n]
	to.n++
	p.rule, p.key, p.cost = d.rule, key, d.cost
	p.counter, _ = d.counter.counter(d.rule, max(at, d.counter.since))
	if ms(wait) > to.RetryAfter {
		to.RetryAfter, to.Denied, to.At = ms(wait), d.rule.Name, time.UnixMilli(at)
	}
}

// ends is until when the denial is remembered.
func (d *denial) ends() time.Duration { return d.asked + min(ms(d.wait), longestDenial) }

// Keep remembers a decision if it is a denial. The charges are as the caller
// gave them, and the store was asked at the time asked.
func (c *DenyCache) Keep(asked time.Time, charges []Charge, d Decision) {
	if d.Allowed || d.Never || asked.Sub(c.start) <= time.Duration(c.forgot.Load()) {
		return
	}
	at := d.At.UnixMilli()
	for i, p := range d.parts() {
		elapsed := p.rule.elapsed(at)
		if p.cost > p.rule.most {
			continue
		}
		wait := p.rule.wait(p.counter, p.cost, elapsed)
		if wait <= 0 {
			continue
		}
		r := *p.rule
		r.given = charges[i].Limit
		kept := denial{rule: &r, cost: p.cost, at: at, wait: wait, asked: asked.Sub(c.start)}
		kept.counter.set(&r, p.counter, at, elapsed)
		c.keep(p.key, kept)
	}
}

func (c *DenyCache) keep(key string, kept denial) {
	if !keepable(key) {
		key = EncodeKey(key)
	}
	hash := c.denials.hash(key)
	s := c.denials.shard(hash)
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := s.home(hash); s.slots[i].entry != nil; i = s.next(i) {
		if e := s.slots[i].entry; s.slots[i].hash == hash && e.key == key && e.value.rule.given == kept.rule.given && e.value.cost == kept.cost {
			e.value = kept
			return
		}
	}
	now := kept.asked
	added := s.insert(hash, key, func(d *denial) bool { return d.ends() <= now },
		func(a, b *denial) int { return cmp.Compare(a.ends(), b.ends()) })
	added.value = kept
}

// Forget drops what is remembered about the limits and keys of the charges,
// because units were given back.
func (c *DenyCache) Forget(charges []Charge) {
	c.forgot.Store(int64(time.Since(c.start))) // answers under way may be from before
	for _, charge := range charges {
		key := charge.Key
		if !keepable(key) {
			key = EncodeKey(key)
		}
		hash := c.denials.hash(key)
		s := c.denials.shard(hash)
		s.mu.Lock()
		for i := s.home(hash); s.slots[i].entry != nil; {
			if e := s.slots[i].entry; e.key == key && e.value.rule.Name == charge.Limit.Name {
				s.remove(i) // another may have moved into the slot
				continue
			}
			i = s.next(i)
		}
		s.mu.Unlock()
	}
}

// Len returns the number of denials remembered, past ones included.
func (c *DenyCache) Len() int { return c.denials.len() }
