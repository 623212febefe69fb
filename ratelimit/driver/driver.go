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
// The suite in ratelimittest/conformance holds all limiters to the same answers.
package driver

import (
	"context"
	"time"

	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/internal/bounds"
	"github.com/holdfast-go/holdfast/ratelimit/internal/storedkey"
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
