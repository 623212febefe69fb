package ratelimitredis_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
)

// impatient returns a client that fails at once without a server.
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

// The setting for outages applies while the server is unreachable, and ends when it is back. The server has lost its
// memory.
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
			t.Errorf("%s: allowed, denied, failed are %v, want %v", setting, got, want)
		}
		if setting != counted {
			if err := l.Refund(t.Context(), c); !errors.Is(err, ratelimit.ErrUnavailable) {
				t.Errorf("%s: a refund returned %v", setting, err)
			}
			continue
		}
		if err := l.Refund(t.Context(), last.Charges()...); err != nil {
			t.Errorf("refund of local charges: %v", err)
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
				err = errors.New("still decided without Redis")
			}
			return err
		})
		// A server that lost its memory admits the limit once more, not twice.
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

// A process's share may be less than the cost of one request. That lasts as long as the outage, not forever.
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

// If a connection falls silent in the middle of a script, its caller waits for the timeout. No other caller waits:
// the next call uses another connection, even if the client would wait forever.
func TestSilentInTheMiddleOfAScript(t *testing.T) {
	t.Parallel()
	silent.BothClients(t, redistest.URL, -1, func(t *testing.T, client *redis.Client, server *silent.Redis) {
		const timeout = 500 * time.Millisecond
		l := open(t, client, ratelimitredis.Config{Timeout: timeout, DenyCache: -1}).OnePipeline()
		c := ratelimit.Charge{Limit: ratelimit.Limit{Name: "calls", Max: 1000, Window: day, Algorithm: ratelimit.TokenBucket}}
		for name, call := range map[string]func(ctx context.Context) error{
			"allow": func(ctx context.Context) error { _, err := l.Allow(ctx, c); return err },
			"peek":  func(ctx context.Context) error { _, err := l.Peek(ctx, c); return err },
			"reserve": func(ctx context.Context) error {
				_, err := l.Reserve(ctx, time.Minute, c)
				return err
			},
			"refund": func(ctx context.Context) error { return l.Refund(ctx, c) },
			"reset":  func(ctx context.Context) error { return l.Reset(ctx, c) },
		} {
			for _, deliver := range []bool{false, true} {
				if err := call(t.Context()); err != nil {
					t.Error(err)
				}
				server.SilenceOn(testenv.Silence{On: "evalsha", Deliver: deliver})
				start := time.Now()
				if err := call(t.Context()); !errors.Is(err, ratelimit.ErrUnavailable) {
					t.Errorf("%s, delivered %v: %v", name, deliver, err)
				}
				silent.Took(t, name, start, timeout)
				if err := call(t.Context()); err != nil {
					t.Error(err)
				}
				silent.Took(t, name+" and another one", start, timeout)
			}
		}
	})
}

// All connections fall silent at once, as behind a router that forgot them. They are closed after the first call
// without an answer, even if its caller left before Config.Timeout.
func TestHalfOpenConnections(t *testing.T) {
	t.Parallel()
	silent.BothClients(t, redistest.URL, 0, func(t *testing.T, client *redis.Client, server *silent.Redis) {
		l, err := ratelimitredis.New(client, ratelimitredis.Config{})
		if err != nil {
			t.Fatal(err)
		}
		silent.Fill(t, client, 40)
		testHalfOpen(t, server, func() error {
			_, err := l.Peek(t.Context(), ratelimit.Charge{Limit: perUser, Key: "ann"})
			return err
		})
	})
}

func TestHalfOpenConnectionsOfTheImpatient(t *testing.T) {
	t.Parallel()
	silent.BothClients(t, redistest.URL, 0, func(t *testing.T, client *redis.Client, server *silent.Redis) {
		l := open(t, client, ratelimitredis.Config{Timeout: time.Minute})
		silent.Fill(t, client, 40)
		testHalfOpen(t, server, func() error {
			ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
			defer cancel()
			_, err := l.Peek(ctx, ratelimit.Charge{Limit: perUser, Key: "ann"})
			return err
		})
	})
}

func testHalfOpen(t *testing.T, server *silent.Redis, call func() error) {
	t.Helper()
	server.SilenceConnections()
	if err := call(); err == nil {
		t.Error("a silent connection answered")
	}
	time.Sleep(5 * time.Second)
	synctest.Wait()
	if n := server.Kept(); n > 0 || server.Silenced() < 40 {
		t.Errorf("%d of %d silent connections are open", n, server.Silenced())
	}
	start := time.Now()
	if err := call(); err != nil {
		t.Error(err)
	}
	silent.Took(t, "the next call", start, 0)
}

// Check reports within seconds that a server does not answer, and that a client has no timeout for it.
func TestCheckOfASilentServer(t *testing.T) {
	t.Parallel()
	silent.BothClients(t, redistest.URL, -1, func(t *testing.T, client *redis.Client, server *silent.Redis) {
		l := open(t, client, ratelimitredis.Config{})
		err := l.Check(t.Context())
		if client.Options().ContextTimeoutEnabled {
			if err != nil {
				t.Error(err)
			}
		} else if fix := findings(t, err, 1)[0].Fix(); !strings.Contains(fix, "ReadTimeout") {
			t.Errorf("%v, Fix returns %q", err, fix)
		}
		server.Pause()
		start := time.Now()
		if err := l.Check(t.Context()); err == nil || hasFix(err) {
			t.Errorf("a silent server: %v", err)
		}
		silent.Took(t, "Check", start, 5*time.Second)
	})
}

// If a server or a process stands still for half a second, as on a busy machine, no request fails.
func TestDefaultTimeout_outlastsAStall(t *testing.T) {
	t.Parallel()
	silent.BothClients(t, redistest.URL, 0, func(t *testing.T, client *redis.Client, server *silent.Redis) {
		l, err := ratelimitredis.New(client, ratelimitredis.Config{})
		if err != nil {
			t.Fatal(err)
		}
		c := ratelimit.Charge{Limit: perUser, Key: "ann"}
		if _, err := l.Allow(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		server.Pause()
		time.AfterFunc(500*time.Millisecond, server.Heal)
		if d, err := l.Allow(t.Context(), c); err != nil || d.Fallback {
			t.Errorf("after a stall: %+v, %v", d, err)
		}
	})
}
