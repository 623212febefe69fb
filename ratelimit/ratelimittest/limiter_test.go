package ratelimittest_test

import (
	"errors"
	"os"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/driver"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimittest"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func TestScript(t *testing.T) {
	t.Parallel()
	l := ratelimittest.New()
	var _ driver.Reserver = l
	l.Deny("user", time.Second)
	l.Fail(ratelimit.ErrUnavailable)
	c := ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: 1}}

	if d, err := l.Allow(t.Context(), c); err != nil || d.Allowed || d.Denied != "user" || d.RetryAfter != time.Second {
		t.Errorf("got %+v, %v, want the scripted denial", d, err)
	}
	if _, err := l.Allow(t.Context(), c); !errors.Is(err, ratelimit.ErrUnavailable) {
		t.Errorf("got %v, want the scripted error", err)
	}
	d, err := l.Allow(t.Context(), c)
	if err != nil || !d.Allowed || len(l.Charged()) != 1 {
		t.Errorf("got %+v, %v, want everything allowed beyond the script", d, err)
	}
	if err := l.Refund(t.Context(), d.Charges()...); err != nil || len(l.Refunded()) != 1 {
		t.Errorf("refund: %v", err)
	}
	l.Next(ratelimit.Decision{Allowed: true, Fallback: true}, nil)
	if d, err := l.Allow(t.Context(), c); err != nil || !d.Fallback || d.Charges() != nil || len(l.Charged()) != 1 {
		t.Errorf("got %+v, %v, want nothing charged where nothing is metered", d, err)
	}
	bucket := ratelimit.Charge{Limit: ratelimit.Limit{Name: "calls", Max: 1, Algorithm: ratelimit.TokenBucket}}
	l.Next(ratelimit.Decision{Allowed: true, Delay: 3 * time.Second}, nil)
	if d, err := l.Reserve(t.Context(), time.Minute, bucket); err != nil || !d.Allowed || d.Delay != 3*time.Second || len(d.Charges()) != 1 {
		t.Errorf("got %+v, %v, want a reservation with the scripted delay", d, err)
	}
	if _, err := l.Allow(t.Context()); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("no charges: %v", err)
	}
}
