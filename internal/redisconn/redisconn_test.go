package redisconn_test

import (
	"context"
	"crypto/rand"
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

// pool is one of the pools of a client.
type pool struct {
	// pop waits on a connection of the pool until the list has something.
	pop   func(ctx context.Context, client *redis.Client, list string) error
	stats func(client *redis.Client) (conns, idle uint32)
}

var pools = map[string]pool{
	"commands": {
		func(ctx context.Context, client *redis.Client, list string) error {
			return client.BLPop(ctx, 0, list).Err()
		},
		func(client *redis.Client) (conns, idle uint32) {
			s := client.PoolStats()
			return s.TotalConns, s.IdleConns
		},
	},
	"pipelines": {
		func(ctx context.Context, client *redis.Client, list string) error {
			pipe := client.Pipeline()
			pipe.BLPop(ctx, 0, list)
			_, err := pipe.Exec(ctx)
			return err
		},
		func(client *redis.Client) (conns, idle uint32) {
			s := client.PoolStats().PipelineStats
			return s.TotalConns, s.IdleConns
		},
	},
}

// Connections that have fallen silent leave their pool, all at once; sound ones stay.
func TestIdle(t *testing.T) {
	t.Parallel()
	const conns = 30
	for name, p := range pools {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			proxy := testenv.NewProxy(t, redistest.URL(t))
			opts, err := redis.ParseURL(proxy.URL())
			if err != nil {
				t.Fatal(err)
			}
			opts.ContextTimeoutEnabled, opts.PoolSize, opts.PipelinePoolSize = true, 2*conns, 2*conns
			client := redis.NewClient(opts)
			defer func() { _ = client.Close() }()
			p.fill(t, client, conns)
			idle := &redisconn.Idle{Client: client, Timeout: time.Second}

			idle.Test(t.Context(), "key")
			p.until(t, client, conns, func() {})
			proxy.SilenceConnections()
			p.until(t, client, 0, func() { idle.Test(t.Context(), "key") }) // it does nothing while tests are under way
		})
	}
}

// fill leaves so many connections idle in the pool.
func (p pool) fill(t *testing.T, client *redis.Client, n int) {
	t.Helper()
	list := rand.Text()
	var all sync.WaitGroup
	for range n {
		all.Go(func() {
			if err := p.pop(t.Context(), client, list); err != nil {
				t.Error(err)
			}
		})
	}
	testenv.Eventually(t, func() error {
		if have, _ := p.stats(client); int(have) < n {
			return fmt.Errorf("%d connections", have)
		}
		return nil
	})
	for range n {
		if err := client.RPush(t.Context(), list, "").Err(); err != nil {
			t.Fatal(err)
		}
	}
	all.Wait()
}

// until waits for the end of the tests, after which so many connections are left, or
// one more: that of fill.
func (p pool) until(t *testing.T, client *redis.Client, want int, again func()) {
	t.Helper()
	testenv.Eventually(t, func() error {
		again()
		if have, idle := p.stats(client); int(have) < want || int(have) > want+1 || idle != have {
			return fmt.Errorf("%d connections, %d of them idle; want %d", have, idle, want)
		}
		return nil
	})
}
