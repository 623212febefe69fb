package ratelimitredis_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
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

// onBothClients runs a test in a bubble, with a client of the real server that heeds the deadlines of contexts and with one
// that does not. The clock stands still while the server works.
func onBothClients(t *testing.T, readTimeout time.Duration, test func(t *testing.T, client *redis.Client, server *silent.Redis)) {
	t.Parallel()
	redistest.URL(t) // skips before there are subtests
	for _, heeds := range []bool{false, true} {
		t.Run(fmt.Sprint("heeds deadlines=", heeds), func(t *testing.T) {
			t.Parallel()
			url := redistest.URL(t)
			synctest.Test(t, func(t *testing.T) {
				server := silent.NewRedis(t, url)
				test(t, server.Client(t, func(o *redis.Options) {
					o.ContextTimeoutEnabled, o.ReadTimeout, o.PoolSize = heeds, readTimeout, 50
				}), server)
			})
		})
	}
}

func wantTook(t *testing.T, what string, start time.Time, want time.Duration) {
	t.Helper()
	if took := time.Since(start); took != want {
		t.Errorf("%s took %v, want %v", what, took, want)
	}
}

// A connection that falls silent in the middle of a script costs its caller the
// timeout, and nobody else anything: the next call takes another one, also if the
// client waits for ever.
func TestSilentInTheMiddleOfAScript(t *testing.T) {
	onBothClients(t, -1, func(t *testing.T, client *redis.Client, server *silent.Redis) {
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
				wantTook(t, name, start, timeout)
				if err := call(t.Context()); err != nil {
					t.Error(err)
				}
				wantTook(t, name+" and another one", start, timeout)
			}
		}
	})
}

// All connections fall silent at once, as behind a router that forgot them: they are closed after the first call that is not
// answered, whether or not its caller has left before Config.Timeout.
func TestHalfOpenConnections(t *testing.T) {
	onBothClients(t, 0, func(t *testing.T, client *redis.Client, server *silent.Redis) {
		l, err := ratelimitredis.New(client, ratelimitredis.Config{})
		if err != nil {
			t.Fatal(err)
		}
		fill(t, client, 40)
		testHalfOpen(t, server, func() error {
			_, err := l.Peek(t.Context(), ratelimit.Charge{Limit: perUser, Key: "ann"})
			return err
		})
	})
}

func TestHalfOpenConnectionsOfTheImpatient(t *testing.T) {
	onBothClients(t, 0, func(t *testing.T, client *redis.Client, server *silent.Redis) {
		l := open(t, client, ratelimitredis.Config{Timeout: time.Minute})
		fill(t, client, 40)
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
	wantTook(t, "the next call", start, 0)
}

// fill leaves so many connections idle in the pool.
func fill(t *testing.T, client *redis.Client, connections int) {
	t.Helper()
	var held []*redis.Conn
	for range connections {
		conn := client.Conn()
		if err := conn.Ping(t.Context()).Err(); err != nil {
			t.Fatal(err)
		}
		held = append(held, conn)
	}
	for _, conn := range held {
		_ = conn.Close() // back to the pool
	}
}

// However many callers fail at once, each idle connection is tested once.
func TestCrowdOnSilentConnections(t *testing.T) {
	onBothClients(t, 0, func(t *testing.T, client *redis.Client, server *silent.Redis) {
		l := open(t, client, ratelimitredis.Config{Timeout: 500 * time.Millisecond})
		const connections = 20
		fill(t, client, connections)
		var tests idleTests
		client.AddHook(&tests)
		server.SilenceConnections()
		var crowd sync.WaitGroup
		for range 500 {
			crowd.Go(func() { _, _ = l.Peek(t.Context(), ratelimit.Charge{Limit: perUser, Key: "ann"}) })
		}
		crowd.Wait()
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if n := tests.running.Load(); n > 0 {
			t.Errorf("%d tests are running", n)
		}
		if n := tests.most.Load(); n == 0 || n > connections {
			t.Errorf("%d tests at once of %d connections", n, connections)
		}
	})
}

// idleTests counts the tests of idle connections.
type idleTests struct{ running, most atomic.Int64 }

func (h *idleTests) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h *idleTests) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (h *idleTests) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() == "mget" {
			n := h.running.Add(1)
			defer h.running.Add(-1)
			for most := h.most.Load(); n > most && !h.most.CompareAndSwap(most, n); most = h.most.Load() {
			}
		}
		return next(ctx, cmd)
	}
}

// Check says in time that a server does not answer, and that a client would not
// notice.
func TestCheckOfASilentServer(t *testing.T) {
	onBothClients(t, -1, func(t *testing.T, client *redis.Client, server *silent.Redis) {
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
		wantTook(t, "Check", start, 5*time.Second)
	})
}
