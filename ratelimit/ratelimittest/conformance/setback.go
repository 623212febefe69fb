package conformance

import (
	"fmt"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/ratelimit"
)

// TestClockSetBack sets the clock of a limiter back: a bucket goes on with what it
// holds and regains from there, and a window that the clock does not leave goes on
// counting. advance is as that of TestSchedules; d is negative.
func TestClockSetBack(t *testing.T, l Limiter, advance func(t *testing.T, d time.Duration)) {
	for n, step := range []time.Duration{time.Millisecond, 10 * time.Second, 59 * time.Second, time.Hour, 24 * time.Hour} {
		for _, held := range []int{1, 0} {
			c := ratelimit.Charge{Key: fmt.Sprint(n, held), Limit: ratelimit.Limit{Name: "calls", Max: 60, Burst: 3, Algorithm: ratelimit.TokenBucket}}
			if got := admitted(t, l, 3-held, c); got != 3-held {
				t.Fatalf("the bucket gave %d, want %d", got, 3-held)
			}
			advance(t, -step)
			if d, err := l.Peek(t.Context(), c); err != nil || d.Allowed != (held > 0) {
				t.Errorf("set back by %v with %d left: a peek says %+v, %v", step, held, d, err)
			}
			if got := admitted(t, l, 5, c); got != held {
				t.Errorf("set back by %v with %d left: %d were admitted", step, held, got)
			}
			if d := allow(t, l, c); d.RetryAfter != time.Second {
				t.Errorf("set back by %v with %d left: the next after %v, want 1s", step, held, d.RetryAfter)
			}
			advance(t, time.Second)
			if got := admitted(t, l, 5, c); got != 1 {
				t.Errorf("set back by %v with %d left: %d were admitted a second later, want 1", step, held, got)
			}
		}
	}
	for _, a := range []ratelimit.Algorithm{ratelimit.SlidingWindow, ratelimit.FixedWindow} {
		c := ratelimit.Charge{Key: fmt.Sprint(a), Limit: ratelimit.Limit{Name: "daily", Max: 3, Window: day, Algorithm: a}}
		now := allow(t, l, c).At
		back := now.Sub(now.Truncate(day)) / 2
		advance(t, -back)
		d := allow(t, l, c)
		if !d.At.Equal(now.Add(-back.Truncate(time.Millisecond))) || d.Limits()[0].Remaining != 1 {
			t.Errorf("algorithm %d, set back within its window: %+v of %v at %v", a, d.Limits(), now, d.At)
		}
		advance(t, back)
		if got := admitted(t, l, 5, c); got != 1 {
			t.Errorf("algorithm %d, right again: %d were admitted, want 1", a, got)
		}
	}
}
