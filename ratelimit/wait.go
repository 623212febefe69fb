package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/telemetry"
)

// Errors of Waiter.Wait.
var (
	// ErrWaitTooLong says that the charges will not be allowed within MaxWait.
	ErrWaitTooLong = errors.New("ratelimit: wait too long")
	// ErrNever says that a cost is more than its limit can ever hold.
	ErrNever = errors.New("ratelimit: cost exceeds limit")
)

// WaiterConfig configures a Waiter. The zero value works.
type WaiterConfig struct {
	// MaxWait bounds one Wait, with the time in the queue. 0 means no bound but
	// the context's.
	MaxWait time.Duration
	// Jitter is the largest share of a wait that is added at random, so that
	// several processes do not wake at the same moment; at most 1. 0 means 0.1. It
	// never makes a wait miss MaxWait.
	Jitter float64
	// UnavailablePause is the pause before a store that could not be asked is asked
	// again. 0 means 1 s.
	UnavailablePause time.Duration

	Rand   func() float64 // from [0, 1); nil means math/rand/v2
	Logger *slog.Logger   // nil means slog.Default()
}

// Waiter blocks workers until their charges are allowed, first come first
// served among those who share it. Make it with NewWaiter. It is safe for
// concurrent use.
type Waiter struct {
	limiter Limiter
	charges []Charge
	cfg     WaiterConfig
	turn    chan struct{} // goroutines that wait to send are served in order
	faults  telemetry.Seldom
}

// NewWaiter returns a Waiter that takes charges from l for every Wait. It refuses
// charges that l cannot decide about together.
func NewWaiter(l Limiter, charges []Charge, cfg WaiterConfig) (*Waiter, error) {
	var errs []error
	if l == nil {
		errs = append(errs, errNilLimiter)
	}
	normal, err := Normalize(charges)
	errs = append(errs, err)
	for _, c := range normal {
		if c.Cost > ruleOf(c.Limit).most {
			errs = append(errs, fmt.Errorf("%w: limit %q: Cost is %d", ErrNever, c.Limit.Name, c.Cost))
		}
	}
	if v, ok := l.(interface{ Validate(charges ...Charge) error }); ok && err == nil {
		errs = append(errs, v.Validate(charges...))
	}
	if cfg.MaxWait < 0 || cfg.UnavailablePause < 0 {
		errs = append(errs, errors.New("ratelimit: WaiterConfig.MaxWait and UnavailablePause must not be negative"))
	}
	if !(cfg.Jitter >= 0 && cfg.Jitter <= 1) {
		errs = append(errs, fmt.Errorf("ratelimit: WaiterConfig.Jitter is %v, must lie between 0 and 1", cfg.Jitter))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if cfg.Jitter == 0 {
		cfg.Jitter = 0.1
	}
	if cfg.UnavailablePause == 0 {
		cfg.UnavailablePause = time.Second
	}
	if cfg.Rand == nil {
		cfg.Rand = rand.Float64
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	return &Waiter{limiter: l, charges: slices.Clone(charges), cfg: cfg, turn: make(chan struct{}, 1)}, nil
}

// Wait returns nil once the charges have been taken. A store that cannot be
// asked is waited for. It returns ctx's error when ctx ends first, ErrWaitTooLong
// as soon as the next try would come after MaxWait, ErrNever for a cost above its
// limit, and the limiter's other errors as they are. Nothing was charged then,
// unless an answer of the store was still on its way.
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

// gaveUp tells the caller's own end from MaxWait.
func gaveUp(ctx context.Context) error {
	if errors.Is(context.Cause(ctx), ErrWaitTooLong) {
		return ErrWaitTooLong
	}
	return ctx.Err()
}

// try asks once. It returns 0 when the charges were taken, else how long to wait
// before the next time.
func (w *Waiter) try(ctx context.Context) (time.Duration, error) {
	d, err := w.limiter.Allow(ctx, w.charges...)
	switch {
	case errors.Is(err, ErrUnavailable):
		if ctx.Err() == nil {
			if repeats, ok := w.faults.Due(); ok {
				w.cfg.Logger.WarnContext(ctx, "ratelimit: waiting for the store", slog.Any("error", err), slog.Int("repeats", repeats))
			}
		}
		return w.cfg.UnavailablePause, nil
	case err != nil:
		return 0, err
	case d.Allowed:
		return 0, nil
	case d.Never:
		return 0, fmt.Errorf("%w: limit %q", ErrNever, d.Denied)
	}
	return max(d.RetryAfter, time.Millisecond), nil
}

// jittered adds to a pause at random, unless that would miss the deadline.
func (w *Waiter) jittered(pause time.Duration, deadline time.Time) time.Duration {
	longer := pause + time.Duration(w.cfg.Jitter*w.cfg.Rand()*float64(pause))
	if !deadline.IsZero() && !time.Now().Add(longer).Before(deadline) {
		return pause
	}
	return longer
}
