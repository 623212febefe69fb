package redisconn_test

import (
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/redisconn"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
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

// Connections that have fallen silent leave the pool, all at once; sound ones stay.
func TestIdle(t *testing.T) {
	t.Parallel()
	const conns = 30
	proxy := testenv.NewProxy(t, redistest.URL(t))
	opts, err := redis.ParseURL(proxy.URL())
	if err != nil {
		t.Fatal(err)
	}
	opts.ContextTimeoutEnabled, opts.PoolSize = true, 2*conns
	client := redis.NewClient(opts)
	defer func() { _ = client.Close() }()
	fill(t, client, conns)
	idle := &redisconn.Idle{Client: client, Timeout: time.Second}

	idle.Test(t.Context(), "key")
	until(t, client, conns, func() {})
	proxy.SilenceConnections()
	until(t, client, 0, func() { idle.Test(t.Context(), "key") }) // it does nothing while tests are under way
}

// Pipelines have connections of their own.
func TestIdleOfPipelines(t *testing.T) {
	t.Parallel()
	const conns = 8
	proxy := testenv.NewProxy(t, redistest.URL(t))
	opts, err := redis.ParseURL(proxy.URL())
	if err != nil {
		t.Fatal(err)
	}
	opts.ContextTimeoutEnabled, opts.PipelinePoolSize = true, conns
	client := redis.NewClient(opts)
	defer func() { _ = client.Close() }()
	idle := &redisconn.Idle{Client: client, Timeout: time.Second}
	wait := func(want uint32) {
		t.Helper()
		testenv.Eventually(t, testenv.Patience, func() error {
			if s := client.PoolStats().PipelineStats; s.TotalConns != want || s.IdleConns != want {
				return fmt.Errorf("%d connections, %d of them idle; want %d", s.TotalConns, s.IdleConns, want)
			}
			return nil
		})
	}

	var all sync.WaitGroup
	for range conns {
		all.Go(func() {
			pipe := client.Pipeline()
			pipe.BLPop(t.Context(), 0, "go on")
			if _, err := pipe.Exec(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	testenv.Eventually(t, testenv.Patience, func() error {
		if s := client.PoolStats().PipelineStats; s.TotalConns < conns {
			return fmt.Errorf("%d connections", s.TotalConns)
		}
		return nil
	})
	for range conns {
		if err := client.RPush(t.Context(), "go on", "").Err(); err != nil {
			t.Fatal(err)
		}
	}
	all.Wait()
	idle.Test(t.Context(), "key")
	wait(conns)
	proxy.SilenceConnections()
	testenv.Eventually(t, testenv.Patience, func() error {
		idle.Test(t.Context(), "key") // it does nothing while tests are under way
		if s := client.PoolStats().PipelineStats; s.TotalConns > 0 {
			return fmt.Errorf("%d connections are left", s.TotalConns)
		}
		return nil
	})
}

// fill leaves so many connections idle in the pool.
func fill(t *testing.T, client *redis.Client, n int) {
	t.Helper()
	var all sync.WaitGroup
	for range n {
		all.Go(func() {
			if err := client.BLPop(t.Context(), 0, "go on").Err(); err != nil {
				t.Error(err)
			}
		})
	}
	testenv.Eventually(t, testenv.Patience, func() error {
		if have := int(client.PoolStats().TotalConns); have < n {
			return fmt.Errorf("%d connections", have)
		}
		return nil
	})
	for range n {
		if err := client.RPush(t.Context(), "go on", "").Err(); err != nil {
			t.Fatal(err)
		}
	}
	all.Wait()
}

// until waits for the end of the tests, after which so many connections are left, or
// one more: that of fill.
func until(t *testing.T, client *redis.Client, want int, again func()) {
	t.Helper()
	testenv.Eventually(t, testenv.Patience, func() error {
		again()
		s := client.PoolStats()
		if have := int(s.TotalConns); have < want || have > want+1 || s.IdleConns != s.TotalConns {
			return fmt.Errorf("%d connections, %d of them idle; want %d", have, s.IdleConns, want)
		}
		return nil
	})
}
