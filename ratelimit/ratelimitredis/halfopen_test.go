package ratelimitredis_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
)

// A connection that falls silent in the middle of a script costs its caller the
// timeout, and nobody else anything: the next call takes another one, also if the
// client waits for ever.
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

// All connections fall silent at once, as behind a router that forgot them: they are closed after the first call that is not
// answered, whether or not its caller has left before Config.Timeout.
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
		t.Error("a silent connection has answered")
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

// Check says in time that a server does not answer, and that a client would not
// notice.
func TestCheckOfASilentServer(t *testing.T) {
	t.Parallel()
	silent.BothClients(t, redistest.URL, -1, func(t *testing.T, client *redis.Client, server *silent.Redis) {
		l := open(t, client, ratelimitredis.Config{})
		err := l.Check(t.Context())
		if client.Options().ContextTimeoutEnabled {
			if err != nil {
				t.Error(err)
			}
		} else if mend := findings(t, err, 1)[0].Mend(); !strings.Contains(mend, "ReadTimeout") {
			t.Errorf("%v is mended by %q", err, mend)
		}
		server.Pause()
		start := time.Now()
		if err := l.Check(t.Context()); err == nil || hasMend(err) {
			t.Errorf("of a silent server it says %v", err)
		}
		silent.Took(t, "Check", start, 5*time.Second)
	})
}

// A server or a process that stands still for half a second, as on a busy machine, refuses no request.
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
