package ratelimit_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimittest"
)

var tenPerSecond = ratelimit.Limit{Name: "calls", Max: 10, Window: time.Second, Algorithm: ratelimit.TokenBucket, Burst: 1}

func newWaiter(t *testing.T, l ratelimit.Limiter, cfg ratelimit.WaiterConfig, charges ...ratelimit.Charge) *ratelimit.Waiter {
	t.Helper()
	cfg.Logger = slog.New(slog.DiscardHandler)
	w, err := ratelimit.NewWaiter(l, charges, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func noJitter() float64 { return 0 }

func TestWaitersAreServedInOrderAtTheRate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWaiter(t, newMemory(t), ratelimit.WaiterConfig{Rand: noJitter}, ratelimit.Charge{Limit: tenPerSecond})
		start := time.Now()
		var mu sync.Mutex
		var order []int
		var wg sync.WaitGroup
		for n := range 50 {
			wg.Go(func() {
				if err := w.Wait(t.Context()); err != nil {
					t.Error(err)
				}
				mu.Lock()
				defer mu.Unlock()
				order = append(order, n)
			})
			synctest.Wait() // n is in the queue
		}
		wg.Wait()
		if took := time.Since(start); took != 4900*time.Millisecond {
			t.Errorf("50 at 10 per second took %v, want 4.9s", took)
		}
		for i, n := range order {
			if i != n {
				t.Fatalf("served in the order %v", order)
			}
		}
	})
}

func TestWaitOnSeveralLimits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		window := ratelimit.Limit{Name: "window", Max: 3, Window: 10 * time.Second}
		w := newWaiter(t, newMemory(t), ratelimit.WaiterConfig{Rand: noJitter},
			ratelimit.Charge{Limit: tenPerSecond}, ratelimit.Charge{Limit: window})
		start := time.Now()
		for range 4 {
			if err := w.Wait(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if took, want := time.Since(start), 10*time.Second+3334*time.Millisecond; took != want {
			t.Errorf("took %v, want %v until a third of the window has lapsed", took, want)
		}
	})
}

func TestWaitEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		slow := ratelimit.Charge{Limit: ratelimit.Limit{Name: "slow", Max: 1, Window: time.Hour, Algorithm: ratelimit.TokenBucket}}
		m := newMemory(t)
		w := newWaiter(t, m, ratelimit.WaiterConfig{MaxWait: time.Minute}, slow)
		if err := w.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		if err := w.Wait(t.Context()); !errors.Is(err, ratelimit.ErrWaitTooLong) || time.Since(start) != 0 {
			t.Errorf("an impossible wait returned %v after %v", err, time.Since(start))
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		patient := newWaiter(t, m, ratelimit.WaiterConfig{}, slow)
		if err := patient.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a caller with less patience got %v", err)
		}
		ctx, cancel = context.WithCancel(t.Context())
		done := make(chan error, 2)
		for range 2 { // one makes the call, the other waits in the queue
			go func() { done <- patient.Wait(ctx) }()
		}
		synctest.Wait()
		cancel()
		for range 2 {
			if err := <-done; !errors.Is(err, context.Canceled) {
				t.Errorf("a cancelled wait returned %v", err)
			}
		}
	})
}

// The random part of a wait is at most a tenth, and never makes the wait too long.
func TestJitter(t *testing.T) {
	t.Parallel()
	for want, cfg := range map[time.Duration]ratelimit.WaiterConfig{
		105 * time.Millisecond: {Rand: func() float64 { return 0.5 }},
		100 * time.Millisecond: {Rand: func() float64 { return 0.99 }, MaxWait: 105 * time.Millisecond},
	} {
		synctest.Test(t, func(t *testing.T) {
			w := newWaiter(t, newMemory(t), cfg, ratelimit.Charge{Limit: tenPerSecond})
			start := time.Now()
			for range 2 {
				if err := w.Wait(t.Context()); err != nil {
					t.Error(err)
				}
			}
			if took := time.Since(start); took != want {
				t.Errorf("a wait of 100 ms took %v, want %v", took, want)
			}
		})
	}
}

func TestWaitOutlastsAnOutage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := ratelimittest.New()
		for range 3 {
			l.Fail(ratelimit.ErrUnavailable)
		}
		w := newWaiter(t, l, ratelimit.WaiterConfig{Rand: noJitter}, ratelimit.Charge{Limit: tenPerSecond})
		start := time.Now()
		if err := w.Wait(t.Context()); err != nil || time.Since(start) != 3*time.Second {
			t.Errorf("got %v after %v, want nil after 3s", err, time.Since(start))
		}
		l.Fail(ratelimit.ErrUnavailable)
		short := newWaiter(t, l, ratelimit.WaiterConfig{MaxWait: 500 * time.Millisecond}, ratelimit.Charge{Limit: tenPerSecond})
		if err := short.Wait(t.Context()); !errors.Is(err, ratelimit.ErrWaitTooLong) {
			t.Errorf("got %v", err)
		}
		odd := errors.New("odd")
		l.Fail(odd)
		if err := w.Wait(t.Context()); !errors.Is(err, odd) {
			t.Errorf("got %v, want the limiter's error", err)
		}
		l.Next(ratelimit.Decision{Denied: "calls", Never: true}, nil)
		if err := w.Wait(t.Context()); !errors.Is(err, ratelimit.ErrNever) {
			t.Errorf("got %v, want ErrNever", err)
		}
	})
}

func TestNewWaiterReportsEveryViolation(t *testing.T) {
	t.Parallel()
	_, err := ratelimit.NewWaiter(nil, nil, ratelimit.WaiterConfig{MaxWait: -1})
	for _, want := range []string{"limiter", "charges", "MaxWait"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not name %s", err, want)
		}
	}
	if _, err := ratelimit.NewWaiter(ratelimittest.New(), []ratelimit.Charge{{Limit: tenPerSecond, Cost: 2}}, ratelimit.WaiterConfig{}); !errors.Is(err, ratelimit.ErrNever) {
		t.Errorf("a cost above the bucket: %v", err)
	}
}

func reserve(t *testing.T, l ratelimit.Limiter, within time.Duration, c ratelimit.Charge) (*ratelimit.Reservation, error) {
	t.Helper()
	return newWaiter(t, l, ratelimit.WaiterConfig{}, c).Reserve(t.Context(), within)
}

func TestReserve(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWaiter(t, newMemory(t), ratelimit.WaiterConfig{MaxWait: time.Nanosecond}, ratelimit.Charge{Limit: tenPerSecond})
		for n := range 3 {
			r, err := w.Reserve(t.Context(), 200*time.Millisecond)
			if err != nil || r.Delay != time.Duration(n)*100*time.Millisecond {
				t.Errorf("reservation %d: %+v, %v", n, r, err)
			}
		}
		if r, err := w.Reserve(t.Context(), 200*time.Millisecond); !errors.Is(err, ratelimit.ErrWaitTooLong) || !strings.Contains(err.Error(), "300ms") {
			t.Errorf("a reservation beyond within: %+v, %v", r, err)
		}
	})
}

// allowing is a Limiter without Reserve.
type allowing struct{ ratelimit.Limiter }

func TestReserveErrors(t *testing.T) {
	t.Parallel()
	bucket := ratelimit.Charge{Limit: tenPerSecond}
	if r, err := reserve(t, allowing{newMemory(t)}, time.Second, bucket); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("of a limiter that cannot: %+v, %v", r, err)
	}
	if r, err := reserve(t, newMemory(t), time.Second, ratelimit.Charge{Limit: perUser}); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("of a window: %+v, %v", r, err)
	}
	l := ratelimittest.New()
	l.Fail(ratelimit.ErrUnavailable)
	if r, err := reserve(t, l, time.Second, bucket); !errors.Is(err, ratelimit.ErrUnavailable) {
		t.Errorf("without a store: %+v, %v", r, err)
	}
	l.Next(ratelimit.Decision{Denied: "calls", Never: true}, nil)
	if r, err := reserve(t, l, time.Second, bucket); !errors.Is(err, ratelimit.ErrNever) {
		t.Errorf("of too much: %+v, %v", r, err)
	}
}

// A limiter that lets requests pass uncounted charges nothing, so there is nothing to refund.
func TestCancelOfAnUnmeteredReservation(t *testing.T) {
	t.Parallel()
	l := ratelimittest.New()
	l.Next(ratelimit.Decision{Allowed: true, Fallback: true}, nil)
	r, err := reserve(t, l, time.Second, ratelimit.Charge{Limit: tenPerSecond})
	if err != nil {
		t.Fatalf("%+v, %v", r, err)
	}
	if err := r.Cancel(t.Context()); err != nil || len(l.Refunded()) != 0 {
		t.Errorf("%v, refunded %v", err, l.Refunded())
	}
}

// uncertain refunds units, and then returns ErrUnavailable.
type uncertain struct{ *ratelimit.Memory }

func (u uncertain) Refund(ctx context.Context, charges ...ratelimit.Charge) error {
	return errors.Join(u.Memory.Refund(ctx, charges...), ratelimit.ErrUnavailable)
}

// A refund with an uncertain result is not repeated, because it could return units of others.
func TestUncertainRefundIsTriedOnce(t *testing.T) {
	t.Parallel()
	m := newMemory(t)
	c := ratelimit.Charge{Limit: ratelimit.Limit{Name: "calls", Max: 2, Window: 24 * time.Hour, Algorithm: ratelimit.TokenBucket}}
	remaining := func() int64 {
		t.Helper()
		d, err := m.Peek(t.Context(), c)
		if err != nil {
			t.Fatal(err)
		}
		if !d.Allowed {
			return 0
		}
		return d.Limits()[0].Remaining + 1
	}
	r, err := reserve(t, uncertain{m}, 0, c)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.Allow(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.Cancel(over); !errors.Is(err, context.Canceled) || remaining() != 0 {
		t.Errorf("a cancel with an ended context: %v, %d are left", err, remaining())
	}
	if err := r.Cancel(t.Context()); !errors.Is(err, ratelimit.ErrUnavailable) {
		t.Errorf("the first cancel returned %v", err)
	}
	if err := r.Cancel(t.Context()); err != nil || remaining() != 1 {
		t.Errorf("the second cancel returned %v and leaves %d, want the 1 free unit", err, remaining())
	}
}
