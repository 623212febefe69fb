package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Charge is what one request takes of one limit.
type Charge struct {
	Limit Limit
	// Key separates those who have a quota of their own, such as user ids. Empty
	// means one quota for all. Any text will do; see EncodeKey.
	Key string
	// Cost is the number of units, at least 1. 0 means 1.
	Cost int64
	// At is for Refund: Decision.Charges carry the time from which their units
	// count, so that exactly those are given back. Allow ignores it.
	At time.Time
	// Local is for Refund: it says that the charge was counted within the process,
	// while the store could not be asked. Allow ignores it.
	Local bool
}

// Limiter decides about charges. Memory and ratelimitredis.Limiter meet it; the
// suite in ratelimittest/conformance says what they promise. Methods are called
// by many goroutines.
type Limiter interface {
	// Allow takes all the charges if every limit admits its charge, and none
	// otherwise. A denial is a Decision, not an error. The error is ErrInvalid for
	// charges that make no sense, ErrUnavailable if the store cannot be asked, and
	// ctx's own if it ends first: the units may have been charged then.
	Allow(ctx context.Context, charges ...Charge) (Decision, error)

	// Refund gives charges back, as Decision.Charges holds them. What has already
	// lapsed is not given back, and no counter falls below 0. A charge without At
	// is given back to the current window. After ErrUnavailable, and ctx's own
	// error, the units may have been given back: a second time would admit others
	// beyond the limit.
	Refund(ctx context.Context, charges ...Charge) error
}

// Errors of this package.
var (
	// ErrInvalid is inside every error about limits and charges that make no
	// sense. Nothing was charged.
	ErrInvalid = errors.New("ratelimit: invalid charge")
	// ErrUnavailable says that the store could not be asked in time. Over HTTP it
	// is a 503. The units may or may not have been charged.
	ErrUnavailable = errors.New("ratelimit: store unavailable")
)

// MaxCharges bounds the number of charges in one decision.
const MaxCharges = 16

// Normalize returns the charges with defaults filled in, or everything that is
// wrong with them, wrapping ErrInvalid. It serves those who implement Limiter.
func Normalize(charges []Charge) ([]Charge, error) {
	if len(charges) == 0 || len(charges) > MaxCharges {
		return nil, fmt.Errorf("%w: %d charges, want 1 to %d", ErrInvalid, len(charges), MaxCharges)
	}
	charges = slices.Clone(charges)
	var errs []error
	for i := range charges {
		c := &charges[i]
		if err := c.Limit.Validate(); err != nil {
			errs = append(errs, err)
		}
		if c.Cost < 0 {
			errs = append(errs, fmt.Errorf("%w: limit %.40q: Cost is %d, must not be negative", ErrInvalid, c.Limit.Name, c.Cost))
		}
		c.Limit = c.Limit.withDefaults()
		c.Cost = max(c.Cost, 1)
		for _, other := range charges[:i] {
			if other.Limit.Name == c.Limit.Name && other.Key == c.Key {
				errs = append(errs, fmt.Errorf("%w: limit %.40q is charged twice for the same key", ErrInvalid, c.Limit.Name))
			}
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return charges, nil
}
