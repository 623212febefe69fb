// Package redisconn is what adapters know about the connections of a Redis client.
package redisconn

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// Timeouts tells whether a client's calls end when the deadline of their context
// says so, and whether it has a bound of its own for an answer. Of a kind of client
// that is not known it says what most have.
func Timeouts(client redis.UniversalClient) (heedsDeadlines, bounded bool) {
	switch c := client.(type) {
	case *redis.Client:
		return c.Options().ContextTimeoutEnabled, c.Options().ReadTimeout > 0
	case *redis.ClusterClient:
		return c.Options().ContextTimeoutEnabled, c.Options().ReadTimeout > 0
	}
	return false, true
}

// maxTested is how many idle connections are tested at once.
const maxTested = 100

// Idle tests the connections that idle in a client's pool, because one has not
// answered. Those that a router or a failover has forgotten look sound, and each
// would fail a call. It is safe for concurrent use.
type Idle struct {
	Client redis.UniversalClient
	// Timeout bounds a test.
	Timeout time.Duration

	running atomic.Int64
}

// Test starts the tests, unless some are under way, and does not wait for them. What
// does not answer leaves the pool. key is in the slot that was asked for.
func (i *Idle) Test(ctx context.Context, key string) {
	idle := min(int64(i.Client.PoolStats().IdleConns), maxTested)
	if idle == 0 || !i.running.CompareAndSwap(0, idle) {
		return
	}
	for range idle {
		go func() {
			defer i.running.Add(-1)
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), i.Timeout)
			defer cancel()
			_ = i.Client.Process(ctx, onceRead{redis.NewSliceCmd(ctx, "mget", key)}) // whatever it says
		}()
	}
}

// onceRead is a command that the client must not repeat: one connection is tested
// by it, not one after the other.
type onceRead struct{ *redis.SliceCmd }

// NoRetry implements redis.Cmder.
func (onceRead) NoRetry() bool { return true }
