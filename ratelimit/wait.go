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
	// waitJitter is the largest share of a wait that is added at random, so that several processes do
	// not wake at the same moment.
	waitJitter = 0.1
	// unavailablePause is the pause before a store that could not be asked is asked again.
	unavailablePause = time.Second
)

// WaiterConfig configures a Waiter. The zero value works.
type WaiterConfig struct {
	// MaxWait bounds one Wait, with the time in the queue. Default: no bound but the context's.
	MaxWait time.Duration
	// Rand returns a number from [0, 1), for a random tenth that is added to each wait; it never makes
	// a wait miss MaxWait. Default: math/rand/v2.
	Rand func() float64
	// Logger is for outages of the store: one line in 10 s. Default: slog.Default().
	Logger *slog.Logger
}

// Waiter blocks workers until their charges are allowed, first come first served among those who
// share it. It implements inbox.Waiter. Make it with NewWaiter. It is safe for concurrent use.
type Waiter struct {
	limiter Limiter
	charges []Charge
	cfg     WaiterConfig
	turn    chan struct{} // goroutines that wait to send are served in order
	faults  telemetry.Seldom
}

// NewWaiter returns a Waiter that takes the charges from l for every Wait. It refuses charges that
// make no sense, and a cost that its limit can never hold.
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

// Wait returns nil once the charges have been taken. While the store cannot be asked it goes on
// asking. It returns ctx's error if ctx ends first, ErrWaitTooLong as soon as the next try would come
// after MaxWait, ErrNever for a cost above its limit, and the limiter's other errors as they are.
// Nothing was charged then, unless an answer of the store was still on its way.
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

// gaveUp returns the reason why a wait ended: MaxWait, or the caller's own context.
func gaveUp(ctx context.Context) error {
	if errors.Is(context.Cause(ctx), ErrWaitTooLong) {
		return ErrWaitTooLong
	}
	return ctx.Err()
}

// try asks once. It returns 0 if the charges were taken, else how long to wait before the next try.
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

// jittered adds to a pause at random, unless that would miss the deadline.
func (w *Waiter) jittered(pause time.Duration, deadline time.Time) time.Duration {
	longer := pause + time.Duration(waitJitter*w.cfg.Rand()*float64(pause))
	if !deadline.IsZero() && !time.Now().Add(longer).Before(deadline) {
		return pause
	}
	return longer
}

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
