// Package redisconn bounds the calls of a Redis client and replaces its dead connections. The Redis adapters share
// it.
package redisconn

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// Timeouts reports whether a client's calls end at the deadline of their context, and whether the client bounds the
// wait for an answer itself. For an unknown kind of client it returns the defaults of go-redis.
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

// Idle tests the idle connections of a client's pools after one connection did not answer. A connection that a router
// or a failover has dropped still looks usable, and each of them would fail a call. Pipelines have their own pool. It
// is safe for concurrent use.
type Idle struct {
	Client redis.UniversalClient
	// Timeout bounds a test.
	Timeout time.Duration

	running atomic.Int64
}

// Test starts the tests and does not wait for them. It does nothing while earlier tests run. A connection that does
// not answer leaves the pool. On a Cluster, key selects the node to test.
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
	_ = process(ctx, onceRead{redis.NewSliceCmd(ctx, "mget", key)}) // it is only tested whether an answer comes
}

// onceRead is a command that the client must not retry, because it tests one connection.
type onceRead struct{ *redis.SliceCmd }

// NoRetry implements redis.Cmder.
func (onceRead) NoRetry() bool { return true }

// Failed makes a Cluster client reload its map of nodes if err is not an answer of a server. By itself the client
// reloads once a minute, and when a node redirects it. A dead node redirects nobody, so its replica would stay
// unknown until the next reload. Failed does not wait, and does nothing for other clients.
func Failed(ctx context.Context, client redis.UniversalClient, err error) {
	cluster, ok := client.(interface{ ReloadState(context.Context) })
	answer := redis.Error(nil)
	if !ok || err == nil || errors.As(err, &answer) || errors.Is(ctx.Err(), context.Canceled) {
		return
	}
	cluster.ReloadState(context.WithoutCancel(ctx)) // runs one reload at a time
}

// grace is the time a client gets to notice that its context has ended.
const grace = time.Second

// Within bounds a call of a client that may ignore its context. A second after the timeout or the end of ctx it
// abandons the call, which ends by the client's own timeouts. The caller must then not read anything that the call
// writes.
func Within[T any](ctx context.Context, timeout time.Duration, call func(context.Context) (T, error)) (T, error) {
	bounded, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	value, left, err := leave(bounded, grace, call)
	if left {
		err = fmt.Errorf("no answer within %v: %w", timeout, err)
	}
	return value, err
}

// Leave is Within without a timeout. It abandons the call as soon as ctx ends.
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
