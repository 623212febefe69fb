package idempotencyredis_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
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
			opts.ContextTimeoutEnabled, opts.ReadTimeout, opts.PoolSize = heeds, readTimeout, 100
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

// A connection that falls silent in the middle of a script costs its caller a
// second try on another one, and is no error: every script may run again.
func TestSilentInTheMiddleOfAScript(t *testing.T) {
	onBothClients(t, -1, func(t *testing.T, client *redis.Client, proxy *testenv.Proxy) {
		s := newStore(t, client, idempotencyredis.Config{Lease: time.Hour, Retention: time.Hour})
		for _, deliver := range []bool{false, true} {
			c := driver.NewClaim(driver.Key(idempotency.NewKey()), fp)
			step := func(what string, take func(ctx context.Context) error) {
				t.Helper()
				testenv.Eventually(t, func() error { return client.Ping(t.Context()).Err() })
				before := proxy.Silenced()
				proxy.SilenceOn(testenv.Silence{On: "evalsha", Deliver: deliver})
				ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
				defer cancel()
				start := time.Now()
				if err := take(ctx); err != nil {
					t.Errorf("%s, delivered %v: %v", what, deliver, err)
				}
				if took := time.Since(start); took > 30*time.Second || proxy.Silenced() != before+1 {
					t.Errorf("%s, delivered %v: %v, %d connections silent", what, deliver, took, proxy.Silenced()-before)
				}
			}
			begin := func(want driver.State) func(ctx context.Context) error {
				return func(ctx context.Context) error {
					out, err := s.Begin(ctx, c)
					if err == nil && out.State != want {
						err = fmt.Errorf("%+v", out)
					}
					return err
				}
			}
			step("begin", begin(driver.Acquired))
			step("extend", func(ctx context.Context) error { return s.Extend(ctx, c) })
			step("release", func(ctx context.Context) error {
				err := s.Release(ctx, c)
				if deliver && errors.Is(err, idempotency.ErrLeaseLost) {
					return nil // the first one freed it
				}
				return err
			})
			step("begin again", begin(driver.Acquired))
			step("complete", func(ctx context.Context) error { return s.Complete(ctx, c, driver.Response{Status: 201}) })
			step("replay", begin(driver.Completed))
		}
	})
}

// What gathers behind lanes whose connections are silent is answered on others.
func TestGatheredTripsOnSilentConnections(t *testing.T) {
	onBothClients(t, -1, func(t *testing.T, client *redis.Client, proxy *testenv.Proxy) {
		s := newStore(t, client, idempotencyredis.Config{})
		if _, err := s.Begin(t.Context(), driver.NewClaim(key, fp)); err != nil {
			t.Fatal(err)
		}
		proxy.SilenceOn(testenv.Silence{On: "evalsha", Connections: 4})
		var wg sync.WaitGroup
		for range 200 {
			wg.Go(func() {
				c := driver.NewClaim(driver.Key(idempotency.NewKey()), fp)
				testenv.Eventually(t, func() error { // the server is spared after five tries in a row
					out, err := s.Begin(t.Context(), c)
					if err == nil && out.State != driver.Acquired {
						t.Errorf("Begin = %+v", out)
					}
					return err
				})
			})
		}
		if wg.Wait(); proxy.Silenced() != 4 {
			t.Errorf("%d connections fell silent", proxy.Silenced())
		}
	})
}

// Connections that have all fallen silent, as behind a router that forgot them,
// are gone through in seconds.
func TestHalfOpenConnections(t *testing.T) {
	onBothClients(t, 0, func(t *testing.T, client *redis.Client, proxy *testenv.Proxy) {
		s := newStore(t, client, idempotencyredis.Config{})
		testenv.InTime(t, 10*time.Second, func() time.Duration {
			openConnections(t, client, 40)
			proxy.SilenceConnections()
			start := time.Now()
			testenv.Eventually(t, func() error {
				_, err := s.Begin(t.Context(), driver.NewClaim(driver.Key(idempotency.NewKey()), fp))
				return err
			})
			return time.Since(start)
		})
	})
}

// openConnections leaves so many connections idle in the client's pool.
func openConnections(t *testing.T, client *redis.Client, n int) {
	t.Helper()
	var all sync.WaitGroup
	block := "block:" + string(idempotency.NewKey())
	for range n {
		all.Go(func() {
			if err := client.BLPop(t.Context(), 0, block).Err(); err != nil {
				t.Error(err)
			}
		})
	}
	testenv.Eventually(t, func() error {
		if have := client.PoolStats().TotalConns; int(have) < n {
			return fmt.Errorf("%d connections", have)
		}
		return nil
	})
	for range n {
		if err := client.RPush(t.Context(), block, "x").Err(); err != nil {
			t.Fatal(err)
		}
	}
	all.Wait()
}

// A server that answers no call costs a few callers their time, and the others
// nothing; soon after it answers again all are served.
func TestSilentServer(t *testing.T) {
	onBothClients(t, -1, func(t *testing.T, client *redis.Client, proxy *testenv.Proxy) {
		s := newStore(t, client, idempotencyredis.Config{})
		ask := func() error {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			_, err := s.Begin(ctx, driver.NewClaim(driver.Key(idempotency.NewKey()), fp))
			return err
		}
		if err := ask(); err != nil {
			t.Fatal(err)
		}
		testenv.InTime(t, 10*time.Second, func() time.Duration {
			proxy.Pause()
			var wg sync.WaitGroup
			for range 10 {
				wg.Go(func() {
					if err := ask(); err == nil {
						t.Error("a silent server answered")
					}
				})
			}
			wg.Wait()
			var waited []time.Duration
			for range 50 {
				start := time.Now()
				if err := ask(); err == nil {
					t.Error("a silent server answered")
				}
				if took := time.Since(start); took > time.Second {
					waited = append(waited, took)
				}
			}
			if len(waited) > 5 || slices.ContainsFunc(waited, func(d time.Duration) bool { return d > 30*time.Second }) {
				t.Errorf("of 50 callers these waited: %v", waited)
			}
			proxy.Resume()
			start := time.Now()
			testenv.Eventually(t, ask)
			return time.Since(start)
		})
	})
}

// Check says in time that a server does not answer, and that a client would not
// notice.
func TestCheckOfASilentServer(t *testing.T) {
	onBothClients(t, -1, func(t *testing.T, client *redis.Client, proxy *testenv.Proxy) {
		s := newStore(t, client, idempotencyredis.Config{})
		err := s.Check(t.Context())
		if forEver := !client.Options().ContextTimeoutEnabled; (err != nil) != forEver || len(findingsOf(err)) > 1 {
			t.Errorf("found %v", err)
		}
		proxy.Pause()
		start := time.Now()
		if err := s.Check(context.Background()); err == nil || len(findingsOf(err)) > 0 {
			t.Errorf("a silent server: %v", err)
		}
		if took := time.Since(start); took > time.Minute {
			t.Errorf("it took %v", took)
		}
	})
}
