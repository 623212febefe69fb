package conformance

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/driver"
)

func bucket(n, burst int64, window time.Duration) ratelimit.Limit {
	return ratelimit.Limit{Name: "bucket", Max: n, Window: window, Algorithm: ratelimit.TokenBucket, Burst: burst}
}

func testReserve(t *testing.T, l Limiter) {
	c := ratelimit.Charge{Limit: bucket(1, 2, 10*time.Second)} // one per 10 s, two at once
	var first time.Time
	for n := range 5 {
		d, err := l.Reserve(t.Context(), 30*time.Second, c)
		if err != nil || !d.Allowed {
			t.Fatalf("reservation %d: %+v, %v", n, d, err)
		}
		if n == 0 {
			first = d.At
		}
		want := max(0, time.Duration(n-1)*10*time.Second-d.At.Sub(first)) // timing: times that the limiter gave
		if d.Delay != want {
			t.Errorf("reservation %d is to wait %v, want %v", n, d.Delay, want)
		}
	}
	d, err := l.Reserve(t.Context(), 30*time.Second, c)
	if err != nil || d.Allowed || d.Denied != "bucket" || d.RetryAfter <= 30*time.Second {
		t.Errorf("reserved beyond the time given: %+v, %v", d, err)
	}
	if d := allow(t, l, c); d.Allowed {
		t.Error("allowed ahead of the reservations")
	}
	if _, err := l.Reserve(t.Context(), time.Second, ratelimit.Charge{Limit: user(1)}); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("reserved from a window: %v", err)
	}
	for _, within := range []time.Duration{-1, driver.MaxReserve + 1} {
		if _, err := l.Reserve(t.Context(), within, c); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("reserved within %v: %v", within, err)
		}
	}
}

// told notes the last decision of a limiter.
type told struct {
	Limiter
	last ratelimit.Decision
}

func (l *told) Reserve(ctx context.Context, within time.Duration, charges ...ratelimit.Charge) (d ratelimit.Decision, err error) {
	d, err = l.Limiter.Reserve(ctx, within, charges...)
	l.last = d
	return d, err
}

func testCancel(t *testing.T, l Limiter) {
	c := ratelimit.Charge{Limit: bucket(1, 1, 100*time.Second)}
	if !allow(t, l, c).Allowed {
		t.Fatal("the bucket is not full")
	}
	noted := &told{Limiter: l}
	waiter, err := ratelimit.NewWaiter(noted, []ratelimit.Charge{c}, ratelimit.WaiterConfig{})
	if err != nil {
		t.Fatal(err)
	}
	reserve := func() (r *ratelimit.Reservation, due time.Time) {
		t.Helper()
		r, err := waiter.Reserve(t.Context(), time.Hour)
		if err != nil || r.Delay != noted.last.Delay {
			t.Fatalf("%+v, %v, want %v", r, err, noted.last.Delay)
		}
		return r, noted.last.At.Add(r.Delay)
	}
	reserve()
	second, place := reserve()
	for range 2 { // twice is once
		if err := second.Cancel(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if _, again := reserve(); again.Sub(place).Abs() > time.Millisecond { // timing: times that the limiter gave
		t.Errorf("after a cancel the next place is %v away from the one given up", again.Sub(place))
	}
	if _, err := waiter.Reserve(t.Context(), time.Second); !errors.Is(err, ratelimit.ErrWaitTooLong) {
		t.Errorf("a reservation beyond the time given: %v", err)
	}
}
