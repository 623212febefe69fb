package ratelimit_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimittest"
)

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
			t.Errorf("a reservation beyond the time given: %+v, %v", r, err)
		}
	})
}

// allowing is a Limiter that cannot reserve.
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

// A limiter that lets requests pass uncounted takes nothing, so there is nothing to give back.
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

// uncertain gives units back, and then says that it may not have.
type uncertain struct{ *ratelimit.Memory }

func (u uncertain) Refund(ctx context.Context, charges ...ratelimit.Charge) error {
	return errors.Join(u.Memory.Refund(ctx, charges...), ratelimit.ErrUnavailable)
}

// What may have been given back is not given back again: it would be somebody
// else's.
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
		t.Errorf("a cancel that came to nothing: %v, %d are left", err, remaining())
	}
	if err := r.Cancel(t.Context()); !errors.Is(err, ratelimit.ErrUnavailable) {
		t.Errorf("the first cancel says %v", err)
	}
	if err := r.Cancel(t.Context()); err != nil || remaining() != 1 {
		t.Errorf("the second cancel says %v and leaves %d, want the 1 that nobody holds", err, remaining())
	}
}
