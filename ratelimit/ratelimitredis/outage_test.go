package ratelimitredis_test

import (
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
)

// impatient returns a client that gives up a server at once.
func impatient(t *testing.T, addr string, db int) *redis.Client {
	t.Helper()
	client := redis.NewClient(&redis.Options{Addr: addr, DB: db, MaxRetries: -1, DialerRetries: 1})
	t.Cleanup(func() {
		if err := client.Close(); err != nil {
			t.Error(err)
		}
	})
	return client
}

// What is configured for an outage holds while the server cannot be reached, and ends when it is back. It has lost its memory.
func TestOutage(t *testing.T) {
	t.Parallel()
	url := redistest.URL(t)
	server, direct := testenv.NewProxy(t, url), redistest.Client(t, url)
	const closed, failOpen, counted = "fail closed", "fail open", "count here"
	limits := map[string]*ratelimitredis.Limiter{}
	for setting, cfg := range map[string]ratelimitredis.Config{closed: {Prefix: "closed"}, failOpen: {Prefix: "open", FailOpen: true}, counted: {Prefix: "counted", Replicas: 2}} {
		cfg.Logger = slog.New(slog.DiscardHandler)
		limits[setting] = open(t, impatient(t, server.Addr(), direct.Options().DB), cfg).Probing(20 * time.Millisecond)
	}
	c := ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: 10, Window: day}, Key: "ann"}
	tokens := ratelimit.Charge{Limit: ratelimit.Limit{Name: "tokens", Max: 10, Window: day, Algorithm: ratelimit.TokenBucket}}
	for setting, l := range limits {
		if d, err := l.Allow(t.Context(), c); err != nil || !d.Allowed || d.Fallback {
			t.Fatalf("%s: %+v, %v", setting, d, err)
		}
	}
	server.Cut()
	for setting, l := range limits {
		allowed, denied, refused := 0, 0, 0
		var last ratelimit.Decision
		for range 20 {
			d, err := l.Allow(t.Context(), c)
			switch {
			case errors.Is(err, ratelimit.ErrUnavailable):
				refused++
			case err != nil || !d.Fallback:
				t.Fatalf("%s: %+v, %v", setting, d, err)
			case d.Allowed:
				allowed, last = allowed+1, d
			default:
				denied++
			}
		}
		want := map[string][3]int{closed: {0, 0, 20}, failOpen: {20, 0, 0}, counted: {5, 15, 0}}[setting]
		if got := [3]int{allowed, denied, refused}; got != want {
			t.Errorf("%s: allowed, denied, refused are %v, want %v", setting, got, want)
		}
		if setting != counted {
			if err := l.Refund(t.Context(), c); !errors.Is(err, ratelimit.ErrUnavailable) {
				t.Errorf("%s: a refund says %v", setting, err)
			}
			continue
		}
		if err := l.Refund(t.Context(), last.Charges()...); err != nil {
			t.Errorf("refund of what was counted here: %v", err)
		}
		if d, err := l.Allow(t.Context(), c); err != nil || !d.Allowed {
			t.Errorf("after the refund: %+v, %v", d, err)
		}
		if d, err := l.Reserve(t.Context(), time.Hour, tokens); err != nil || !d.Allowed || d.Limits()[0].Capacity != 5 {
			t.Errorf("a reservation: %+v, %v", d, err)
		}
	}
	if err := direct.FlushDB(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
	server.Heal()
	for setting, l := range limits {
		testenv.Eventually(t, func() error {
			d, err := l.Allow(t.Context(), c)
			if err == nil && d.Fallback {
				err = errors.New("still not asked")
			}
			return err
		})
		// A server that lost its memory admits what the limit says once more, not twice.
		n := 1
		for range 20 {
			if d, err := l.Allow(t.Context(), c); err == nil && d.Allowed && !d.Fallback {
				n++
			}
		}
		if n > 10 {
			t.Errorf("%s: %d were allowed after the restart", setting, n)
		}
	}
}

// A process's share may be less than one request costs: that is so for as long as
// the outage, not for ever.
func TestCostAboveTheLocalShare(t *testing.T) {
	t.Parallel()
	l := open(t, impatient(t, "127.0.0.1:1", 0), ratelimitredis.Config{Replicas: 4, Logger: slog.New(slog.DiscardHandler)})
	for _, a := range []ratelimit.Algorithm{ratelimit.SlidingWindow, ratelimit.FixedWindow, ratelimit.TokenBucket} {
		limit := ratelimit.Limit{Name: fmt.Sprint("limit", a), Max: 10, Algorithm: a}
		d, err := l.Allow(t.Context(), ratelimit.Charge{Limit: limit, Cost: 3})
		if err != nil || d.Allowed || d.Never || d.RetryAfter != time.Second {
			t.Errorf("a cost above the share: %+v, %v, want a denial until the next probe", d, err)
		}
		if d, err := l.Allow(t.Context(), ratelimit.Charge{Limit: limit, Cost: 11}); err != nil || d.Allowed || !d.Never {
			t.Errorf("a cost above the limit: %+v, %v, want never", d, err)
		}
	}
}
