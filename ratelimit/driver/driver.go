// Package driver has what an implementation of ratelimit.Limiter needs and its users do not.
//
// A limiter on a store of its own makes its decisions in four steps, of which nobody may see the
// counters change between the second and the last:
//
//  1. [ratelimit.Charges.Normalize] fills in defaults and refuses charges that make no sense.
//  2. The limiter reads the [Counter] of each charge, brought forward to the store's time.
//  3. [ratelimit.Decision.Decide] decides, and adds the charges to the counters.
//  4. The limiter stores the counters of a decision that allows.
//
// The suite in internal/ratelimit/conformance holds all limiters to the same answers.
package driver

import (
	"cmp"
	"context"
	"math"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/internal/bounds"
	"github.com/holdfast-go/holdfast/ratelimit/internal/storedkey"
	"github.com/holdfast-go/holdfast/ratelimit/internal/table"
)

const (
	// MaxCharges is the number of charges that one decision has at most.
	MaxCharges = bounds.Charges
	// MaxReserve is the longest time ahead for which tokens can be reserved.
	MaxReserve = bounds.Reserve
)

// Counter is the stored state of one limit, brought forward to the time of the decision.
type Counter = struct {
	// Prev and Cur count the units charged in the previous and in the current window; windows are
	// aligned to the Unix epoch. For a TokenBucket, Cur is what is missing from a full bucket, in
	// units times the window's milliseconds, so that Limit.Max of them come back every millisecond;
	// Prev is 0. It exceeds the bucket while reservations wait.
	Prev, Cur int64
}

// Reserver is a Limiter that can take tokens ahead of time. ratelimit.Memory, ratelimit.Leased
// and ratelimitredis.Limiter implement it; users call Waiter.Reserve.
type Reserver interface {
	ratelimit.Limiter

	// Reserve is Allow for token buckets that may go into debt: the charges are taken if the tokens
	// for all of them will be there within the given time, and Decision.Delay says when. Limits that
	// are no token buckets are refused with ErrInvalid. within is 0 to MaxReserve; see
	// ratelimit.Charges.CheckReserve.
	Reserve(ctx context.Context, within time.Duration, charges ...ratelimit.Charge) (ratelimit.Decision, error)
}

// EncodeKey returns the form in which a key is stored: itself if it is 1 to 64 of [A-Za-z0-9._-], else
// "h-" and 128 bits of its SHA-256 in hexadecimal. So no key can reach into another's name, choose a
// cluster slot or grow without bound. Keys that begin with "h-" are hashed too, so that none can pose
// as a hash. Empty stays empty.
func EncodeKey(key string) string { return storedkey.Encode(key) }

// DenyCache remembers for a second what a store denied, or for less if the store would admit it
// sooner, so that a flood of denied requests costs one round trip a second. It serves limiters on a
// distant store. Make it with NewDenyCache. It is safe for concurrent use.
//
// A denial stands for the very limit, key and cost that were denied: a raised Max or a lower cost is
// asked about. Units that another process gives back are seen when the second is over.
type DenyCache struct {
	denials *table.Table[*denial]
	start   time.Time
	forgot  atomic.Int64 // when Forget was called last, since start
}

// denial is what is remembered about one charge. It does not change.
type denial struct {
	given   ratelimit.Limit    // as the caller wrote it
	cost    int64              // with its default
	denied  ratelimit.Decision // about this charge alone
	counter Counter            // at the time of the decision
	ends    time.Duration      // when it is forgotten, by our clock, since start
	asked   time.Duration      // by our clock, since start: not after the decision

	at   int64 // of the decision, in milliseconds of the store's clock
	next int64 // when the next window begins; never for a bucket
	rate int64 // what comes back to a bucket in a millisecond, 0 for a window
}

const (
	// longestDenial bounds how long a denial is remembered. Units that were taken for a moment only,
	// such as those of replays, may come back in any process.
	longestDenial = time.Second
	// mostFound is how many denials one decision reports.
	mostFound = 3
)

// NewDenyCache returns a cache of at most so many denials, at least 64.
func NewDenyCache(most int) *DenyCache {
	return &DenyCache{denials: table.New[*denial](most), start: time.Now()}
}

// Find fills in d with the denial of the charges if a limit among them is known to deny, and reports
// whether one is. The charges need not be normalized.
func (c *DenyCache) Find(charges []ratelimit.Charge, d *ratelimit.Decision) (found bool) {
	now := time.Since(c.start)
	var known [mostFound]*denial
	var denied [mostFound]ratelimit.Charge
	n := 0
	at := int64(math.MinInt64)
	for i := range charges {
		if n == mostFound {
			break
		}
		k := c.find(&charges[i], now)
		if k == nil {
			continue
		}
		known[n], denied[n] = k, charges[i]
		denied[n].Cost = k.cost
		n++
		at = max(at, k.at+(now-k.asked).Milliseconds())
	}
	if n == 0 {
		return false
	}
	var counters [mostFound]Counter
	for i, k := range known[:n] {
		counters[i] = k.counterAt(at)
	}
	if n == 1 {
		*d = known[0].denied // whose limit Decide then knows
	}
	d.Decide(time.UnixMilli(at), 0, false, denied[:n], counters[:n])
	if d.Allowed { // it ended just now
		*d = ratelimit.Decision{}
		return false
	}
	d.Cached = true
	return true
}

// find returns what is known about one charge, or nil.
func (c *DenyCache) find(charge *ratelimit.Charge, now time.Duration) *denial {
	if charge.Cost < 0 { // invalid: not ours to answer
		return nil
	}
	key := keyOf(charge)
	hash, cost := c.denials.Hash(key), max(charge.Cost, 1)
	s := c.denials.Shard(hash)
	if s.Empty() {
		return nil
	}
	s.Lock()
	defer s.Unlock()
	for i := s.Home(hash); s.Slots[i].Entry != nil; i = s.Next(i) {
		e := s.Slots[i].Entry
		if s.Slots[i].Hash != hash || !e.Value.isOf(charge.Limit, cost) || e.Key != key {
			continue
		}
		if now >= e.Value.ends {
			s.Remove(i)
			return nil
		}
		return e.Value
	}
	return nil
}

// keyOf returns the key under which a charge's denials are kept.
func keyOf(charge *ratelimit.Charge) string {
	if storedkey.Short(charge.Key) {
		return charge.Key
	}
	return storedkey.Encode(charge.Key)
}

func (d *denial) isOf(limit ratelimit.Limit, cost int64) bool {
	return d.cost == cost && d.given == limit
}

// counterAt brings the counter forward to a time that is less than a window after the decision.
func (d *denial) counterAt(at int64) Counter {
	switch {
	case d.rate > 0:
		return Counter{Cur: max(0, d.counter.Cur-(at-d.at)*d.rate)}
	case at >= d.next:
		return Counter{Prev: d.counter.Cur}
	}
	return d.counter
}

// Keep remembers a decision if it is a denial. The charges are as the caller gave them, and the store
// was asked at the time asked.
func (c *DenyCache) Keep(asked time.Time, charges []ratelimit.Charge, d ratelimit.Decision) {
	if d.Allowed || d.Never || asked.Sub(c.start) <= time.Duration(c.forgot.Load()) {
		return
	}
	counters := d.Counters()
	for i, state := range d.Limits() {
		charge := charges[i]
		charge.Cost = max(charge.Cost, 1)
		if charge.Cost <= state.Remaining {
			continue // another limit denied
		}
		kept := &denial{
			given: charge.Limit, cost: charge.Cost, counter: counters[i], at: d.At.UnixMilli(),
			asked: asked.Sub(c.start), ends: asked.Sub(c.start) + min(state.Reset, longestDenial),
		}
		if charge.Limit.Algorithm == ratelimit.TokenBucket {
			kept.rate = state.Max
		} else {
			window := state.Window.Milliseconds()
			kept.next = kept.at - kept.at%window + window
		}
		key := keyOf(&charge)
		charge.Key = "" // which may be long
		kept.denied.Decide(d.At, 0, false, []ratelimit.Charge{charge}, counters[i:i+1])
		c.keep(key, kept)
	}
}

func (c *DenyCache) keep(key string, kept *denial) {
	hash := c.denials.Hash(key)
	s := c.denials.Shard(hash)
	s.Lock()
	defer s.Unlock()
	for i := s.Home(hash); s.Slots[i].Entry != nil; i = s.Next(i) {
		e := s.Slots[i].Entry
		if s.Slots[i].Hash == hash && e.Key == key && e.Value.isOf(kept.given, kept.cost) {
			e.Value = kept
			return
		}
	}
	now := kept.asked
	added := s.Insert(hash, key, func(d **denial) bool { return (*d).ends <= now },
		func(a, b **denial) int { return cmp.Compare((*a).ends, (*b).ends) })
	added.Value = kept
}

// Forget drops what is remembered about the limits and keys of the charges, because units were given
// back.
func (c *DenyCache) Forget(charges []ratelimit.Charge) {
	c.forgot.Store(int64(time.Since(c.start))) // answers under way may be from before
	for i := range charges {
		charge := &charges[i]
		key := keyOf(charge)
		hash := c.denials.Hash(key)
		s := c.denials.Shard(hash)
		s.Lock()
		for i := s.Home(hash); s.Slots[i].Entry != nil; {
			if e := s.Slots[i].Entry; e.Key == key && e.Value.given.Name == charge.Limit.Name {
				s.Remove(i) // another may have moved into the slot
				continue
			}
			i = s.Next(i)
		}
		s.Unlock()
	}
}

// Len returns the number of denials remembered, past ones included.
func (c *DenyCache) Len() int { return c.denials.Len() }
