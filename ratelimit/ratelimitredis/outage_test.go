package ratelimitredis_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync/atomic"
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

// A failover may forget what was not replicated: at most the limit once more.
func TestFailover(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "replication takes its time; TestOutage sees a loss of memory")
	primary, replica := testenv.Private(t, testenv.Redis), testenv.Private(t, testenv.Redis)
	from, to := redistest.Client(t, primary.URL()), redistest.Client(t, replica.URL())
	host, port, err := net.SplitHostPort(from.Options().Addr)
	if err != nil {
		t.Fatal(err)
	}
	if err := to.ReplicaOf(t.Context(), host, port).Err(); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, func() error {
		if n, err := from.Wait(t.Context(), 1, time.Second).Result(); err != nil || n != 1 {
			return fmt.Errorf("%d replicas, %w", n, err)
		}
		return nil
	})
	var current atomic.Pointer[string] // where the client connects, as a failover client learns it
	addr := from.Options().Addr
	current.Store(&addr)
	client := redis.NewClient(&redis.Options{Dialer: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, *current.Load())
	}})
	t.Cleanup(func() {
		if err := client.Close(); err != nil {
			t.Error(err)
		}
	})
	l := open(t, client, ratelimitredis.Config{DenyCache: -1})
	c := ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: 100, Window: day}, Key: "ann"}
	allowed := 0
	ask := func() error {
		d, err := l.Allow(t.Context(), c)
		if err == nil && d.Allowed {
			allowed++
		}
		return err
	}
	for range 60 {
		if err := ask(); err != nil {
			t.Fatal(err)
		}
	}
	testenv.Eventually(t, func() error { // WAIT would tell of writes of its own connection only
		keys, err := to.Keys(t.Context(), "rate_limit:user:ann:*").Result()
		if err != nil || len(keys) != 1 {
			return fmt.Errorf("keys %q, %w", keys, err)
		}
		if n, err := to.Get(t.Context(), keys[0]).Int(); err != nil || n != allowed {
			return fmt.Errorf("the replica has %d of %d, %w", n, allowed, err)
		}
		return nil
	})
	if err := replica.Pause(); err != nil { // what comes now is lost
		t.Fatal(err)
	}
	for range 20 {
		if err := ask(); err != nil {
			t.Fatal(err)
		}
	}
	if err := primary.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := ask(); !errors.Is(err, ratelimit.ErrUnavailable) {
		t.Errorf("between the two: %v", err)
	}
	if err := replica.Resume(); err != nil {
		t.Fatal(err)
	}
	if err := to.ReplicaOf(t.Context(), "NO", "ONE").Err(); err != nil {
		t.Fatal(err)
	}
	addr2 := to.Options().Addr
	current.Store(&addr2)
	testenv.Eventually(t, ask)
	for range 100 {
		if err := ask(); err != nil {
			t.Fatal(err)
		}
	}
	if allowed < 100 || allowed > 120 {
		t.Errorf("%d were allowed, want the limit of 100 and at most the 20 that the failover forgot", allowed)
	}
}
