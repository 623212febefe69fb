// Package driver has the types that an implementation of ratelimit.Limiter needs and its users do not.
//
// A limiter on its own store decides in four steps. The counters must not change between the second and
// the last step:
//
//  1. [ratelimit.Charges.Normalize] fills in defaults and rejects invalid charges.
//  2. The limiter reads the [Counter] of each charge, brought forward to the store's time.
//  3. [ratelimit.Decision.Decide] decides, and adds the charges to the counters.
//  4. The limiter stores the counters of a decision that allows.
//
// The suite in internal/ratelimit/conformance requires the same answers of all limiters.
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
	// MaxCharges is the largest number of charges in one decision.
	MaxCharges = bounds.Charges
	// MaxReserve is the longest time ahead for which tokens can be reserved.
	MaxReserve = bounds.Reserve
)

// Counter is the stored state of one limit, brought forward to the time of the decision.
type Counter = struct {
	// Prev and Cur count the units charged in the previous and in the current window; windows are aligned to the Unix
	// epoch. For a TokenBucket, Cur is the amount missing from a full bucket, in units times the window's
	// milliseconds, so that it falls by Limit.Max every millisecond; Prev is 0. Cur exceeds the bucket while
	// reservations wait.
	Prev, Cur int64
}

// Reserver is a Limiter that can reserve tokens ahead of time. ratelimit.Memory, ratelimit.Leased and
// ratelimitredis.Limiter implement it; users call Waiter.Reserve.
type Reserver interface {
	ratelimit.Limiter

	// Reserve is Allow for token buckets, which may go into debt. The charges are taken if the tokens for all of them
	// will be available within the given time; Decision.Delay is the time until then. Limits with another algorithm
	// are rejected with ErrInvalid. within is 0 to MaxReserve; see ratelimit.Charges.CheckReserve.
	Reserve(ctx context.Context, within time.Duration, charges ...ratelimit.Charge) (ratelimit.Decision, error)
}

// EncodeKey returns the stored form of a key: the key itself if it is 1 to 64 of [A-Za-z0-9._-], else "h-" and 128
// bits of its SHA-256 in hexadecimal. So no key can escape into another name, choose a cluster slot or have any
// length. Keys that begin with "h-" are hashed too, so that no key can look like a hash. An empty key stays empty.
func EncodeKey(key string) string { return storedkey.Encode(key) }

// DenyCache remembers the denials of a store for a second, or for less if the store would admit the charge sooner, so
// that many denied requests cost one round trip a second. It is for limiters on a remote store. Make it with
// NewDenyCache. It is safe for concurrent use.
//
// A denial counts only for the same limit, key and cost. With a raised Max or a lower cost the store decides again. A
// refund by another process takes effect after the second.
type DenyCache struct {
	denials *table.Table[*denial]
	start   time.Time
	forgot  atomic.Int64 // time of the last Forget, since start
}

// denial is the remembered denial of one charge. It is immutable.
type denial struct {
	given   ratelimit.Limit    // as the caller wrote it
	cost    int64              // with its default
	denied  ratelimit.Decision // about this charge only
	counter Counter            // at the time of the decision
	ends    time.Duration      // when the denial ends, by this process's clock, since start
	asked   time.Duration      // time of the call, by this process's clock, since start: not after the decision

	at   int64 // time of the decision, in milliseconds of the store's clock
	next int64 // when the next window begins; unused for a bucket
	rate int64 // what a bucket regains in a millisecond; 0 for a window
}

const (
	// longestDenial limits how long a denial is remembered. Units that are charged only briefly, such as those of
	// replays, may be refunded in any process.
	longestDenial = time.Second
	// mostFound limits the denials that one decision reports.
	mostFound = 3
)

// NewDenyCache returns a cache for at most that many denials; at least 64.
func NewDenyCache(most int) *DenyCache {
	return &DenyCache{denials: table.New[*denial](most), start: time.Now()}
}

// Find fills in d with a denial of the charges if one of their limits is known to deny, and reports whether it did.
// The charges need not be normalized.
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
		*d = known[0].denied // Decide then reuses its rule
	}
	d.Decide(time.UnixMilli(at), 0, false, denied[:n], counters[:n])
	if d.Allowed { // the denial has just ended
		*d = ratelimit.Decision{}
		return false
	}
	d.Cached = true
	return true
}

// find returns the denial of one charge, or nil.
func (c *DenyCache) find(charge *ratelimit.Charge, now time.Duration) *denial {
	if charge.Cost < 0 { // invalid: the store rejects it
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

// keyOf returns the key under which a charge's denials are stored.
func keyOf(charge *ratelimit.Charge) string {
	if storedkey.Short(charge.Key) {
		return charge.Key
	}
	return storedkey.Encode(charge.Key)
}

func (d *denial) isOf(limit ratelimit.Limit, cost int64) bool {
	return d.cost == cost && d.given == limit
}

// counterAt brings the counter forward to a time less than a window after the decision.
func (d *denial) counterAt(at int64) Counter {
	switch {
	case d.rate > 0:
		return Counter{Cur: max(0, d.counter.Cur-(at-d.at)*d.rate)}
	case at >= d.next:
		return Counter{Prev: d.counter.Cur}
	}
	return d.counter
}

// Keep remembers a decision if it is a denial. charges are the caller's charges, and asked is the time when the store
// was called.
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
		charge.Key = "" // it may be long
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

// Forget drops the denials of the limits and keys of the charges, because units were refunded.
func (c *DenyCache) Forget(charges []ratelimit.Charge) {
	c.forgot.Store(int64(time.Since(c.start))) // running calls may return older answers
	for i := range charges {
		charge := &charges[i]
		key := keyOf(charge)
		hash := c.denials.Hash(key)
		s := c.denials.Shard(hash)
		s.Lock()
		for i := s.Home(hash); s.Slots[i].Entry != nil; {
			if e := s.Slots[i].Entry; e.Key == key && e.Value.given.Name == charge.Limit.Name {
				s.Remove(i) // another entry may have moved into the slot
				continue
			}
			i = s.Next(i)
		}
		s.Unlock()
	}
}

// Len returns the number of remembered denials, including ended ones.
func (c *DenyCache) Len() int { return c.denials.Len() }
