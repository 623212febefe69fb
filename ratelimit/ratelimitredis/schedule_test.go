package ratelimitredis_test

import (
	"crypto/rand"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimittest/conformance"
)

func testSchedules(t *testing.T, client redis.UniversalClient) {
	t.Helper()
	for range 3 {
		l, advance := ratelimitredis.NewWithClock(t, client, ratelimitredis.Config{Prefix: "test:" + rand.Text(), Timeout: patient})
		conformance.TestSchedules(t, l, advance, 400)
	}
}

func TestSchedules(t *testing.T) {
	t.Parallel()
	testSchedules(t, redistest.New(t))
}

// A server whose clock is set back admits nothing more until it is there again,
// or, after a step of more than a window, counts on from what was left.
func TestServerClockSetBack(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	for _, step := range []time.Duration{time.Millisecond, 10 * time.Second, 59 * time.Second, time.Hour} {
		l, advance := ratelimitredis.NewWithClock(t, client, ratelimitredis.Config{Prefix: "test:" + rand.Text(), Timeout: patient})
		c := ratelimit.Charge{Limit: ratelimit.Limit{Name: "calls", Max: 60, Burst: 3, Algorithm: ratelimit.TokenBucket}}
		ask := func() (allowed int, last ratelimit.Decision) {
			t.Helper()
			for range 5 {
				d, err := l.Allow(t.Context(), c)
				if err != nil {
					t.Fatal(err)
				}
				if d.Allowed {
					allowed++
				}
				last = d
			}
			return allowed, last
		}
		if n, _ := ask(); n != 3 {
			t.Fatalf("the bucket gave %d, want 3", n)
		}
		advance(t, -step)
		n, d := ask()
		want := time.Second + step // until the clock is there again, and a token
		if step > time.Minute {
			want = time.Second
		}
		if n != 0 || d.RetryAfter != want {
			t.Errorf("set back by %v: %d more, the next after %v, want 0 and %v", step, n, d.RetryAfter, want)
		}
		advance(t, step)
		if n, _ := ask(); n != 0 && step < time.Minute {
			t.Errorf("set back by %v and right again: %d more, want 0", step, n)
		}
		advance(t, time.Second)
		if n, _ := ask(); n != 1 && step < time.Minute {
			t.Errorf("a second later: %d more, want 1", n)
		}
	}
}
