package ratelimit

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// Reservation is a charge that was taken ahead of time: act once Delay has passed, or Cancel. Make
// it with Waiter.Reserve. It is safe for concurrent use.
type Reservation struct {
	// Delay is how long to wait, from the reservation on, before acting on it.
	Delay time.Duration

	limiter Limiter
	mu      sync.Mutex
	charges []Charge // nil: nothing to give back, or no more
}

// reserver is driver.Reserver.
type reserver interface {
	Reserve(ctx context.Context, within time.Duration, charges ...Charge) (Decision, error)
}

// Reserve takes the waiter's charges ahead of time if the tokens for all of them will be there
// within the given time, 0 to 24 hours. It asks once and does not wait; MaxWait does not count. It
// returns ErrWaitTooLong if the tokens come later, ErrInvalid for limits that are no token buckets,
// ErrNever for a cost above its limit, ErrUnavailable if the store cannot be asked, and ctx's own
// error.
func (w *Waiter) Reserve(ctx context.Context, within time.Duration) (*Reservation, error) {
	r, ok := w.limiter.(reserver)
	if !ok {
		return nil, fmt.Errorf("%w: the limiter cannot reserve", ErrInvalid)
	}
	d, err := r.Reserve(ctx, within, w.charges...)
	switch {
	case err != nil:
		return nil, err
	case d.Never:
		return nil, d.Err()
	case !d.Allowed:
		return nil, fmt.Errorf("%w: limit %q has the tokens in %v", ErrWaitTooLong, d.Denied, d.RetryAfter)
	}
	return &Reservation{Delay: d.Delay, limiter: w.limiter, charges: d.Charges()}, nil
}

// Cancel gives the tokens back, so that whoever reserves next gets them. Once they have been regained
// by the passing of time there is nothing to give back. It asks the store once, and further calls do
// nothing: after ErrUnavailable the tokens may have been given back, and a second time would take
// them from others. With a context that has ended it does nothing and may be called again.
func (r *Reservation) Cancel(ctx context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.charges) == 0 {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	charges := r.charges
	r.charges = nil
	return r.limiter.Refund(ctx, charges...)
}
