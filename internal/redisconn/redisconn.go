// Package redisconn is what adapters know about the connections of a Redis client.
package redisconn

import (
	"context"
	"errors"
	"fmt"
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

// maxTested is how many idle connections of each pool are tested at once.
const maxTested = 100

// Idle tests the connections that idle in a client's pools, because one has not
// answered. Those that a router or a failover has forgotten look sound, and each
// would fail a call. Pipelines have a pool of their own. It is safe for concurrent use.
type Idle struct {
	Client redis.UniversalClient
	// Timeout bounds a test.
	Timeout time.Duration

	running atomic.Int64
}

// Test starts the tests, unless some are under way, and does not wait for them. What
// does not answer leaves the pool. key is in the slot that was asked for.
func (i *Idle) Test(ctx context.Context, key string) {
	alone, pipelined := i.idle()
	if alone+pipelined == 0 || !i.running.CompareAndSwap(0, alone+pipelined) {
		return
	}
	for range alone {
		go i.ask(ctx, key, i.Client.Process)
	}
	for range pipelined {
		go i.ask(ctx, key, func(ctx context.Context, cmd redis.Cmder) error {
			pipe := i.Client.Pipeline()
			_ = pipe.Process(ctx, cmd) // queues it
			_, err := pipe.Exec(ctx)
			return err
		})
	}
}

// idle counts the connections to test for commands, and for pipelines.
func (i *Idle) idle() (alone, pipelined int64) {
	stats := i.Client.PoolStats()
	if stats.PipelineStats != nil {
		pipelined = min(int64(stats.PipelineStats.IdleConns), maxTested)
	}
	return min(int64(stats.IdleConns), maxTested), pipelined
}

func (i *Idle) ask(ctx context.Context, key string, process func(context.Context, redis.Cmder) error) {
	defer i.running.Add(-1)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), i.Timeout)
	defer cancel()
	_ = process(ctx, onceRead{redis.NewSliceCmd(ctx, "mget", key)}) // whatever it says
}

// onceRead is a command that the client must not repeat: one connection is tested
// by it, not one after the other.
type onceRead struct{ *redis.SliceCmd }

// NoRetry implements redis.Cmder.
func (onceRead) NoRetry() bool { return true }

// Failed has the client of a Cluster ask again which node serves which slot, if err is not
// the answer of a server. The client by itself asks once a minute, and when a node refers it to
// another one, which a node that is gone does not do: the replica in its place would be unknown
// until then. Failed does not wait, and does nothing for other clients.
func Failed(ctx context.Context, client redis.UniversalClient, err error) {
	cluster, ok := client.(interface{ ReloadState(context.Context) })
	answer := redis.Error(nil)
	if !ok || err == nil || errors.As(err, &answer) || errors.Is(ctx.Err(), context.Canceled) {
		return
	}
	cluster.ReloadState(context.WithoutCancel(ctx)) // one at a time
}

// grace is how long a client may take to notice that its context has ended.
const grace = time.Second

// Within bounds a call of a client that may not mind the end of its context: a second after that, or
// after the timeout, the call is left behind, and ends by the client's own timeouts. Nothing that
// the call writes to may be looked at then.
func Within[T any](ctx context.Context, timeout time.Duration, call func(context.Context) (T, error)) (T, error) {
	bounded, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	value, left, err := leave(bounded, grace, call)
	if left {
		err = fmt.Errorf("no answer within %v: %w", timeout, err)
	}
	return value, err
}

// Leave is Within without a timeout of its own, and leaves the call behind as soon as ctx ends.
func Leave[T any](ctx context.Context, call func(context.Context) (T, error)) (T, error) {
	value, _, err := leave(ctx, 0, call)
	return value, err
}

func leave[T any](ctx context.Context, grace time.Duration, call func(context.Context) (T, error)) (none T, left bool, err error) {
	type result struct {
		value T
		err   error
	}
	results := make(chan result, 1)
	go func() {
		value, err := call(ctx)
		results <- result{value, err}
	}()
	select {
	case r := <-results:
		return r.value, false, r.err
	case <-ctx.Done():
	}
	if grace > 0 {
		select {
		case r := <-results:
			return r.value, false, r.err
		case <-time.After(grace):
		}
	}
	return none, true, ctx.Err()
}
