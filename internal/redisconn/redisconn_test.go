package redisconn_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/redisconn"
	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func TestTimeouts(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		client         redis.UniversalClient
		heeds, bounded bool
	}{
		"default":       {redis.NewClient(&redis.Options{}), false, true},
		"heeds":         {redis.NewClient(&redis.Options{ContextTimeoutEnabled: true, ReadTimeout: -1}), true, false},
		"for ever":      {redis.NewClient(&redis.Options{ReadTimeout: -1}), false, false},
		"cluster":       {redis.NewClusterClient(&redis.ClusterOptions{ContextTimeoutEnabled: true}), true, true},
		"of some other": {redis.NewRing(&redis.RingOptions{}), false, true},
	} {
		heeds, bounded := redisconn.Timeouts(tt.client)
		if err := tt.client.Close(); err != nil || heeds != tt.heeds || bounded != tt.bounded {
			t.Errorf("%s: heeds %v, bounded %v, %v", name, heeds, bounded, err)
		}
	}
}

// cluster counts how often it is asked to reload its nodes.
type cluster struct {
	redis.UniversalClient
	asked int
}

func (c *cluster) ReloadState(context.Context) { c.asked++ }

type answer struct{ error }

func (answer) RedisError() {}

func TestFailed(t *testing.T) {
	t.Parallel()
	given, cancel := context.WithCancel(t.Context())
	cancel()
	for _, c := range []struct {
		name string
		ctx  context.Context
		err  error
		want int
	}{
		{"no error", t.Context(), nil, 0},
		{"the server's answer", t.Context(), fmt.Errorf("script: %w", answer{errors.New("OOM")}), 0},
		{"no such key", t.Context(), redis.Nil, 0},
		{"a caller who gave up", given, context.Canceled, 0},
		{"no answer", t.Context(), errors.New("connection refused"), 1},
		{"no answer in time", t.Context(), context.DeadlineExceeded, 1},
	} {
		client := &cluster{}
		redisconn.Failed(c.ctx, client, c.err)
		if client.asked != c.want {
			t.Errorf("%s: it asks %d times, want %d", c.name, client.asked, c.want)
		}
	}
	alone := redis.NewClient(&redis.Options{})
	redisconn.Failed(t.Context(), alone, errors.New("connection refused")) // no Cluster
	if err := alone.Close(); err != nil {
		t.Error(err)
	}
}

// Silent connections leave their pool together, after Timeout. Working connections stay.
func TestIdle(t *testing.T) {
	t.Parallel()
	const conns = 30
	for name, pipelined := range map[string]bool{"commands": false, "pipelines": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				gate := make(chan struct{})
				var tests atomic.Int64
				s := silent.NewRedis(t, "")
				s.Reply = func(args []string) string {
					switch args[0] {
					case "get":
						<-gate
					case "mget":
						tests.Add(1)
					}
					return ""
				}
				client := s.Client(t, func(o *redis.Options) {
					o.ContextTimeoutEnabled, o.PoolSize, o.PipelinePoolSize = true, 2*conns, 2*conns
				})
				var all sync.WaitGroup
				for range conns { // each holds a connection until the gate opens
					all.Go(func() {
						_, err := client.Pipelined(t.Context(), func(p redis.Pipeliner) error {
							if pipelined {
								p.Get(t.Context(), "key")
								return nil
							}
							return client.Get(t.Context(), "key").Err()
						})
						if err != nil {
							t.Error(err)
						}
					})
				}
				time.Sleep(time.Second)
				close(gate)
				all.Wait()
				want := func(what string, conns uint32) {
					t.Helper()
					stats := client.PoolStats()
					have, idle := stats.TotalConns, stats.IdleConns
					if pipelined {
						have, idle = stats.PipelineStats.TotalConns, stats.PipelineStats.IdleConns
					}
					if have != conns || idle != conns {
						t.Errorf("%s: %d connections, %d of them idle; want %d", what, have, idle, conns)
					}
				}

				idle := &redisconn.Idle{Client: client, Timeout: time.Second}
				for range 10 { // nine do nothing: tests are under way
					idle.Test(t.Context(), "key")
				}
				synctest.Wait()
				want("sound ones", conns)
				if n := tests.Load(); n != conns {
					t.Errorf("%d tests of %d connections", n, conns)
				}
				s.SilenceConnections()
				idle.Test(t.Context(), "key")
				time.Sleep(time.Second)
				synctest.Wait()
				want("silent ones", 0)
				if n := s.Kept(); n > 0 {
					t.Errorf("%d silent connections are open", n)
				}
			})
		})
	}
}

// A call ends by its own timeout, or a second later if the client ignores contexts.
func TestWithin(t *testing.T) {
	t.Parallel()
	for heeds, want := range map[bool]time.Duration{true: 2 * time.Second, false: 3 * time.Second} {
		t.Run(fmt.Sprint("heeds deadlines=", heeds), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s := silent.NewRedis(t, "")
				client := s.Client(t, func(o *redis.Options) { o.ContextTimeoutEnabled, o.ReadTimeout = heeds, -1 })
				s.SilenceOn(testenv.Silence{On: "ping"})
				start := time.Now()
				_, err := redisconn.Within(t.Context(), 2*time.Second, func(ctx context.Context) (string, error) { return client.Ping(ctx).Result() })
				if took := time.Since(start); err == nil || took != want {
					t.Errorf("error %v after %v, want %v", err, took, want)
				}
			})
		})
	}
}

// A call on a silent connection to a real server ends in time, and the next call gets another connection.
func TestSilentConnection_onRedis(t *testing.T) {
	t.Parallel()
	proxy := testenv.NewProxy(t, redistest.URL(t))
	opts, err := redis.ParseURL(proxy.URL())
	if err != nil {
		t.Fatal(err)
	}
	opts.ContextTimeoutEnabled, opts.ReadTimeout = true, -1
	client := redis.NewClient(opts)
	t.Cleanup(func() { _ = client.Close() })
	ping := func() error {
		_, err := redisconn.Within(t.Context(), 300*time.Millisecond, func(ctx context.Context) (string, error) { return client.Ping(ctx).Result() })
		return err
	}
	testenv.Eventually(t, ping)
	proxy.SilenceConnections()
	if ping() == nil {
		t.Error("a silent connection has answered")
	}
	testenv.Eventually(t, ping)
}
