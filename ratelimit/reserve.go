package ratelimit

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// Reserver is a Limiter that can take tokens ahead of time. Memory and
// ratelimitredis.Limiter meet it.
type Reserver interface {
	Limiter

	// Reserve is Allow for token buckets that may go into debt: the charges are
	// taken if the tokens for all of them will be there within the given time, and
	// Decision.Delay says when. Limits that are no token buckets are refused with
	// ErrInvalid. within is 0 to 24 hours.
	Reserve(ctx context.Context, within time.Duration, charges ...Charge) (Decision, error)
}

// MaxReserve is the longest time ahead for which tokens can be reserved.
const MaxReserve = 24 * time.Hour

// Reservation is a charge taken ahead of time: act once Decision.Delay has
// passed since it was made, or Cancel. It is safe for concurrent use.
type Reservation struct {
	// Decision says whether the tokens were taken and when to act.
	Decision Decision

	limiter Limiter
	mu      sync.Mutex
	gone    bool // nothing to give back, or no more
}

// Reserve makes a reservation. It returns an error as Reserver.Reserve does; a
// reservation that was not possible within the time has Decision.Allowed false.
func Reserve(ctx context.Context, r Reserver, within time.Duration, charges ...Charge) (*Reservation, error) {
	d, err := r.Reserve(ctx, within, charges...)
	if err != nil {
		return nil, err
	}
	return &Reservation{Decision: d, limiter: r, gone: !d.taken}, nil
}

// Cancel gives the tokens back, so that whoever reserves next gets them. Once
// they have been regained by the passing of time there is nothing to give back.
// It asks the store once, and further calls do nothing: after ErrUnavailable the
// tokens may have been given back, and a second time would take them from others.
// With a context that has ended it does nothing and may be called again.
func (r *Reservation) Cancel(ctx context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.gone {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	r.gone = true
	return r.limiter.Refund(ctx, r.Decision.Charges()...)
}

// CheckReserve reports, wrapping ErrInvalid, why normalized charges cannot be
// reserved. It serves those who implement Reserver.
func CheckReserve(within time.Duration, charges []Charge) error {
	if within < 0 || within > MaxReserve {
		return fmt.Errorf("%w: within is %v, must lie between 0 and %v", ErrInvalid, within, MaxReserve)
	}
	for _, c := range charges {
		if c.Limit.Algorithm != TokenBucket {
			return fmt.Errorf("%w: limit %.40q cannot be reserved: it is no token bucket", ErrInvalid, c.Limit.Name)
		}
		if c.Limit.Max > exactFloat/2/MaxReserve.Milliseconds() {
			return fmt.Errorf("%w: limit %.40q is too large to reserve", ErrInvalid, c.Limit.Name)
		}
	}
	return nil
}
