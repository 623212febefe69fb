package ratelimit_test

import (
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
