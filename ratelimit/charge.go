package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/holdfast-go/holdfast/ratelimit/internal/bounds"
)

// Charge is what one request takes of one limit.
type Charge struct {
	// Limit is the limit. Required.
	Limit Limit
	// Key separates those who have a quota of their own, such as user ids. Any text will do; the
	// package's documentation says how it is stored. Default: empty, one quota for all.
	Key string
	// Cost is the number of units, at least 1. Default: 1.
	Cost int64
	// At is for Refund: Decision.Charges carry the time from which their units count, so that exactly
	// those are given back. Allow ignores it. Optional.
	At time.Time
	// Local is for Refund: the charge was counted within the process while the store could not be
	// asked. Allow ignores it. Optional.
	Local bool
}

// Limiter decides about charges. Memory, Leased and ratelimitredis.Limiter implement it. Package driver has
// what another implementation needs, and ratelimittest/conformance is the suite that it must pass.
// All methods are safe for concurrent use.
type Limiter interface {
	// Allow takes all the charges if every limit admits its charge, and none otherwise. A denial is a
	// Decision, not an error; Decision.Err makes it one. The error is ErrInvalid for charges that
	// make no sense, ErrUnavailable if the store cannot be asked, and ctx's own if ctx ends first:
	// the units may have been charged then.
	Allow(ctx context.Context, charges ...Charge) (Decision, error)

	// Refund gives charges back, as Decision.Charges returns them. What has already lapsed is not
	// given back, and no counter falls below 0. A charge without At is given back to the current
	// window. After ErrUnavailable, and ctx's own error, the units may have been given back: a second
	// time would admit others beyond the limit.
	Refund(ctx context.Context, charges ...Charge) error
}

// Charges are the charges of one decision. Its methods serve those who implement a Limiter.
type Charges []Charge

// Normalize returns the charges with defaults filled in, or everything that is wrong with them,
// wrapping ErrInvalid. It leaves the charges themselves as they are.
func (cs Charges) Normalize() (Charges, error) {
	if err := cs.checkCount(); err != nil {
		return nil, err
	}
	normal := slices.Clone(cs)
	var errs []error
	for i := range normal {
		c := &normal[i]
		if err := c.Limit.Validate(); err != nil {
			errs = append(errs, err)
		}
		if c.Cost < 0 {
			errs = append(errs, fmt.Errorf("%w: limit %.40q: Cost is %d, must not be negative", ErrInvalid, c.Limit.Name, c.Cost))
		}
		c.Limit = c.Limit.withDefaults()
		c.Cost = max(c.Cost, 1)
		for _, other := range normal[:i] {
			if other.Limit.Name == c.Limit.Name && other.Key == c.Key {
				errs = append(errs, fmt.Errorf("%w: limit %.40q is charged twice for the same key", ErrInvalid, c.Limit.Name))
			}
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return normal, nil
}

func (cs Charges) checkCount() error {
	if len(cs) == 0 || len(cs) > bounds.Charges {
		return fmt.Errorf("%w: %d charges, want 1 to %d", ErrInvalid, len(cs), bounds.Charges)
	}
	return nil
}

// CheckReserve reports, wrapping ErrInvalid, why the normalized charges cannot be reserved within
// that time.
func (cs Charges) CheckReserve(within time.Duration) error {
	if within < 0 || within > bounds.Reserve {
		return fmt.Errorf("%w: within is %v, must lie between 0 and %v", ErrInvalid, within, bounds.Reserve)
	}
	for _, c := range cs {
		if c.Limit.Algorithm != TokenBucket {
			return fmt.Errorf("%w: limit %.40q cannot be reserved: it is no token bucket", ErrInvalid, c.Limit.Name)
		}
		if c.Limit.Max > exactFloat/2/bounds.Reserve.Milliseconds() {
			return fmt.Errorf("%w: limit %.40q is too large to reserve", ErrInvalid, c.Limit.Name)
		}
	}
	return nil
}
