package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/telemetry"
)

const (
	// waitJitter is the largest share of a wait that is added randomly, so that several processes do not wake at the
	// same moment.
	waitJitter = 0.1
	// unavailablePause is the pause before the next call to a store that was unavailable.
	unavailablePause = time.Second
)

// WaiterConfig configures a Waiter. The zero value works.
type WaiterConfig struct {
	// MaxWait limits one Wait, including the time in the queue. Default: only the context limits it.
	MaxWait time.Duration
	// Rand returns a number from [0, 1) for the random part of each wait, up to a tenth. It never makes a wait exceed
	// MaxWait. Default: math/rand/v2.
	Rand func() float64
	// Logger is for outages of the store: one line in 10 s. Default: slog.Default().
	Logger *slog.Logger
}

// Waiter blocks workers until their charges are allowed. Workers that share a Waiter are served in the order they
// came. It implements inbox.Waiter. Make it with NewWaiter. It is safe for concurrent use.
type Waiter struct {
	limiter Limiter
	charges []Charge
	cfg     WaiterConfig
	turn    chan struct{} // goroutines waiting to send are served in order
	faults  telemetry.Seldom
}

// NewWaiter returns a Waiter that takes the charges from l for every Wait. It rejects invalid charges and a cost that
// its limit can never hold.
func NewWaiter(l Limiter, charges []Charge, cfg WaiterConfig) (*Waiter, error) {
	var errs []error
	if l == nil {
		errs = append(errs, errNilLimiter)
	}
	normal, err := Charges(charges).Normalize()
	errs = append(errs, err)
	for _, c := range normal {
		if c.Cost > ruleOf(c.Limit).most {
			errs = append(errs, fmt.Errorf("%w: limit %q: Cost is %d", ErrNever, c.Limit.Name, c.Cost))
		}
	}
	if cfg.MaxWait < 0 {
		errs = append(errs, fmt.Errorf("ratelimit: WaiterConfig.MaxWait is %v, must not be negative", cfg.MaxWait))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if cfg.Rand == nil {
		cfg.Rand = rand.Float64
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	return &Waiter{limiter: l, charges: slices.Clone(charges), cfg: cfg, turn: make(chan struct{}, 1)}, nil
}

// Wait returns nil after the charges have been taken. While the store is unavailable it tries again. It returns ctx's
// error if ctx ends first, ErrWaitTooLong as soon as the next try would come after MaxWait, ErrNever for a cost above
// its limit, and other errors of the limiter unchanged. With an error nothing was charged, unless an answer of the
// store was still on its way.
func (w *Waiter) Wait(ctx context.Context) error {
	if w.cfg.MaxWait == 0 {
		return w.wait(ctx, time.Time{})
	}
	deadline := time.Now().Add(w.cfg.MaxWait)
	ctx, cancel := context.WithDeadlineCause(ctx, deadline, ErrWaitTooLong)
	defer cancel()
	return w.wait(ctx, deadline)
}

func (w *Waiter) wait(ctx context.Context, deadline time.Time) error {
	select {
	case w.turn <- struct{}{}:
		defer func() { <-w.turn }()
	case <-ctx.Done():
		return gaveUp(ctx)
	}
	for {
		pause, err := w.try(ctx)
		if err == nil && pause == 0 {
			return nil
		}
		if ctx.Err() != nil {
			return gaveUp(ctx)
		}
		if err != nil {
			return err
		}
		if !deadline.IsZero() && time.Now().Add(pause).After(deadline) {
			return ErrWaitTooLong
		}
		if runloop.Sleep(ctx, w.jittered(pause, deadline)) != nil {
			return gaveUp(ctx)
		}
	}
}

// gaveUp returns the reason why a wait ended: MaxWait, or the end of the caller's context.
func gaveUp(ctx context.Context) error {
	if errors.Is(context.Cause(ctx), ErrWaitTooLong) {
		return ErrWaitTooLong
	}
	return ctx.Err()
}

// try makes one call. It returns 0 if the charges were taken, otherwise the wait before the next try.
func (w *Waiter) try(ctx context.Context) (time.Duration, error) {
	d, err := w.limiter.Allow(ctx, w.charges...)
	switch {
	case errors.Is(err, ErrUnavailable):
		if ctx.Err() == nil {
			if repeats, ok := w.faults.Due(); ok {
				w.cfg.Logger.WarnContext(ctx, "ratelimit: waiting for the store", slog.Any("error", err), slog.Int("repeats", repeats))
			}
		}
		return unavailablePause, nil
	case err != nil:
		return 0, err
	case d.Allowed:
		return 0, nil
	case d.Never:
		return 0, d.Err()
	}
	return max(d.RetryAfter, time.Millisecond), nil
}

// jittered adds a random time to a pause, unless that would miss the deadline.
func (w *Waiter) jittered(pause time.Duration, deadline time.Time) time.Duration {
	longer := pause + time.Duration(waitJitter*w.cfg.Rand()*float64(pause))
	if !deadline.IsZero() && !time.Now().Add(longer).Before(deadline) {
		return pause
	}
	return longer
}

// Reservation is a charge that was taken ahead of time. Act after Delay has passed, or call Cancel. Make it with
// Waiter.Reserve. It is safe for concurrent use.
type Reservation struct {
	// Delay is the time between the reservation and the action.
	Delay time.Duration

	limiter Limiter
	mu      sync.Mutex
	charges []Charge // nil: nothing to refund, or already refunded
}

// reserver is driver.Reserver.
type reserver interface {
	Reserve(ctx context.Context, within time.Duration, charges ...Charge) (Decision, error)
}

// Reserve takes the waiter's charges ahead of time, if the tokens for all of them will be available within the given
// time, 0 to 24 hours. It makes one call and does not wait; MaxWait does not apply. It returns ErrWaitTooLong if the
// tokens come later, ErrInvalid for limits that are not token buckets, ErrNever for a cost above its limit,
// ErrUnavailable if the store is unavailable, and ctx's own error.
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

// Cancel returns the tokens, so that the next reservation gets them. If the tokens have been regained over time,
// there is nothing to return. It makes one call to the store, and further calls do nothing: after ErrUnavailable the
// tokens may have been returned, and a second return would take tokens from others. If ctx has already ended, it does
// nothing and may be called again.
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
