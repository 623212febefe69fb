package ratelimitredis_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
)

// onBothClients runs a test with a client that heeds the deadlines of contexts and
// with one that does not, behind a proxy.
func onBothClients(t *testing.T, readTimeout time.Duration, test func(t *testing.T, client *redis.Client, proxy *testenv.Proxy)) {
	t.Parallel()
	for _, heeds := range []bool{false, true} {
		t.Run(fmt.Sprint("heeds deadlines=", heeds), func(t *testing.T) {
			t.Parallel()
			proxy := testenv.NewProxy(t, redistest.URL(t))
			opts, err := redis.ParseURL(proxy.URL())
			if err != nil {
				t.Fatal(err)
			}
			opts.ContextTimeoutEnabled, opts.ReadTimeout, opts.PoolSize = heeds, readTimeout, 50
			client := redis.NewClient(opts)
			t.Cleanup(func() {
				proxy.Cut() // ends what waits for ever
				if err := client.Close(); err != nil {
					t.Error(err)
				}
			})
			test(t, client, proxy)
		})
	}
}

// A connection that falls silent in the middle of a script costs its caller the
// timeout, and nobody else anything: the next call takes another one, also if the
// client waits for ever.
func TestSilentInTheMiddleOfAScript(t *testing.T) {
	onBothClients(t, -1, func(t *testing.T, client *redis.Client, proxy *testenv.Proxy) {
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
				testenv.InTime(t, 10*timeout, func() time.Duration {
					testenv.Eventually(t, func() error { return call(t.Context()) })
					proxy.SilenceOn(testenv.Silence{On: "evalsha", Deliver: deliver})
					start := time.Now()
					if err := call(t.Context()); !errors.Is(err, ratelimit.ErrUnavailable) {
						t.Errorf("%s, delivered %v: %v", name, deliver, err)
					}
					return time.Since(start)
				})
				testenv.Eventually(t, func() error { return call(t.Context()) })
			}
		}
	})
}

// Connections that have all fallen silent, as behind a router that forgot them,
// are gone through in seconds.
func TestHalfOpenConnections(t *testing.T) {
	onBothClients(t, 0, func(t *testing.T, client *redis.Client, proxy *testenv.Proxy) {
		l, err := ratelimitredis.New(client, ratelimitredis.Config{})
		if err != nil {
			t.Fatal(err)
		}
		testenv.InTime(t, 10*time.Second, func() time.Duration {
			fill(t, client, 40)
			proxy.SilenceConnections()
			start := time.Now()
			testenv.Eventually(t, func() error {
				_, err := l.Peek(t.Context(), ratelimit.Charge{Limit: perUser, Key: "ann"})
				return err
			})
			return time.Since(start)
		})
	})
}

// A caller who leaves before Config.Timeout has the idle connections tested, all of which are silent.
func TestHalfOpenConnectionsOfTheImpatient(t *testing.T) {
	onBothClients(t, 0, func(t *testing.T, client *redis.Client, proxy *testenv.Proxy) {
		l := open(t, client, ratelimitredis.Config{Timeout: time.Minute})
		fill(t, client, 40)
		proxy.SilenceConnections()
		ctx, leave := context.WithCancel(t.Context())
		defer leave()
		defer time.AfterFunc(1500*time.Millisecond, leave).Stop()
		if _, err := l.Peek(ctx, ratelimit.Charge{Limit: perUser, Key: "ann"}); err == nil {
			t.Error("a silent connection has answered")
		}
		testenv.Eventually(t, func() error {
			if n := client.PoolStats().TotalConns; n > 0 {
				return fmt.Errorf("%d connections are left", n)
			}
			return nil
		})
	})
}

// fill leaves so many connections idle in the pool.
func fill(t *testing.T, client *redis.Client, connections int) {
	t.Helper()
	queue := "queue:" + rand.Text()
	var all sync.WaitGroup
	for range connections { // each holds one until there is something to pop
		all.Go(func() {
			if err := client.BLPop(t.Context(), 10*patient, queue).Err(); err != nil {
				t.Error(err)
			}
		})
	}
	testenv.Eventually(t, func() error {
		if n := int(client.PoolStats().TotalConns); n < connections {
			return fmt.Errorf("%d connections", n)
		}
		return nil
	})
	if err := client.RPush(t.Context(), queue, slices.Repeat([]any{1}, connections)...).Err(); err != nil {
		t.Fatal(err)
	}
	all.Wait()
}

// However many callers fail at once, each idle connection is tested once.
func TestCrowdOnSilentConnections(t *testing.T) {
	onBothClients(t, 0, func(t *testing.T, client *redis.Client, proxy *testenv.Proxy) {
		l := open(t, client, ratelimitredis.Config{Timeout: 500 * time.Millisecond})
		const connections = 20
		fill(t, client, connections)
		var tests idleTests
		client.AddHook(&tests)
		proxy.SilenceConnections()
		var crowd sync.WaitGroup
		for range 500 {
			crowd.Go(func() { _, _ = l.Peek(t.Context(), ratelimit.Charge{Limit: perUser, Key: "ann"}) })
		}
		crowd.Wait()
		testenv.Eventually(t, func() error {
			if n := tests.running.Load(); n > 0 {
				return fmt.Errorf("%d tests are running", n)
			}
			return nil
		})
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
	onBothClients(t, -1, func(t *testing.T, client *redis.Client, proxy *testenv.Proxy) {
		l := open(t, client, ratelimitredis.Config{})
		err := l.Check(t.Context())
		if client.Options().ContextTimeoutEnabled {
			if err != nil {
				t.Error(err)
			}
		} else if mend := findings(t, err, 1)[0].Mend(); !strings.Contains(mend, "ReadTimeout") {
			t.Errorf("%v is mended by %q", err, mend)
		}
		proxy.Pause()
		start := time.Now()
		if err := l.Check(context.Background()); err == nil || hasMend(err) {
			t.Errorf("of a silent server it says %v", err)
		}
		if took := time.Since(start); took > 30*time.Second {
			t.Errorf("it took %v", took)
		}
	})
}
