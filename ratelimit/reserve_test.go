package ratelimit_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimittest"
)

// A limiter whose policy lets requests pass takes nothing, so there is nothing
// to give back.
func TestCancelOfAnUnmeteredReservation(t *testing.T) {
	t.Parallel()
	l := ratelimittest.New()
	l.Next(ratelimit.Decision{Allowed: true, Fallback: true}, nil)
	r, err := ratelimit.Reserve(t.Context(), l, time.Second, ratelimit.Charge{Limit: tenPerSecond})
	if err != nil || !r.Decision.Allowed {
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
	r, err := ratelimit.Reserve(t.Context(), uncertain{m}, 0, c)
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
