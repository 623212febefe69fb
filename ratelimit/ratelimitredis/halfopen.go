package ratelimitredis

import (
	"context"
	"errors"

	"github.com/redis/go-redis/v9"
)

// timeouts tells whether a client's calls end when the deadline of their context
// says so, and whether it has a bound of its own for an answer. Of a kind of client
// that is not known it says what most have.
func timeouts(client redis.UniversalClient) (heedsDeadlines, bounded bool) {
	switch c := client.(type) {
	case *redis.Client:
		return c.Options().ContextTimeoutEnabled, c.Options().ReadTimeout > 0
	case *redis.ClusterClient:
		return c.Options().ContextTimeoutEnabled, c.Options().ReadTimeout > 0
	}
	return false, true
}

// maxTested is how many idle connections are tested at once.
const maxTested = 32

// onceRead is a command that the client must not repeat: one connection is tested
// by it, not one after the other.
type onceRead struct{ *redis.SliceCmd }

// NoRetry implements redis.Cmder.
func (onceRead) NoRetry() bool { return true }

// testIdle tests the connections that idle in the pool because one has not
// answered. Those that a router or a failover has forgotten look sound, and each
// would fail a call; what does not answer here leaves the pool without one. key is
// in the slot that was asked for.
func (l *Limiter) testIdle(ctx context.Context, key string, cause error) {
	if answered := redis.Error(nil); errors.As(cause, &answered) {
		return
	}
	idle := int(l.client.PoolStats().IdleConns)
	for range min(idle, maxTested) {
		go func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.cfg.Timeout)
			defer cancel()
			_ = l.client.Process(ctx, onceRead{redis.NewSliceCmd(ctx, "mget", key)}) // whatever it says
		}()
	}
}
