package redisconn_test

import (
	"fmt"
	"os"
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
	proxy := testenv.NewProxy(t, redistest.URL(t))
	opts, err := redis.ParseURL(proxy.URL())
	if err != nil {
		t.Fatal(err)
	}
	opts.ContextTimeoutEnabled, opts.PoolSize, opts.MinIdleConns = true, 60, 30
	client := redis.NewClient(opts)
	defer func() { _ = client.Close() }()
	idle := &redisconn.Idle{Client: client, Timeout: 500 * time.Millisecond}
	settled := func() {
		t.Helper()
		testenv.Eventually(t, testenv.Patience, func() error {
			if s := client.PoolStats(); s.IdleConns < 30 {
				return fmt.Errorf("%d idle connections", s.IdleConns)
			}
			return nil
		})
	}
	settled()
	before := client.PoolStats().StaleConns
	idle.Test(t.Context(), "key")
	settled()
	if s := client.PoolStats(); s.StaleConns != before {
		t.Errorf("%d sound connections were closed", s.StaleConns-before)
	}

	proxy.SilenceConnections()
	idle.Test(t.Context(), "key")
	testenv.Eventually(t, testenv.Patience, func() error {
		if n := client.PoolStats().StaleConns - before; n < 30 {
			return fmt.Errorf("%d of 30 connections were closed", n)
		}
		return nil
	})
	if err := client.Ping(t.Context()).Err(); err != nil {
		t.Error(err)
	}
}
