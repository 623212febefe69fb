package ratelimitredis

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/ratelimit"
)

const (
	maxBatch = 128    // calls in one pipeline: less than half a millisecond of the server's time
	maxQueue = 10_000 // calls that wait; beyond, callers are refused at once
)

// lanes sends calls to Redis over a few pipelines at a time: what callers ask
// while all are under way travels together in the next. Nobody waits longer than
// they want to, also where the client does not heed its context, and a server
// that does not answer holds a few goroutines, not one per caller. Where the
// client does heed deadlines, a caller who finds a free lane sends the call
// itself, which spares a goroutine, a timer and two wake-ups.
type lanes struct {
	client  redis.UniversalClient
	timeout time.Duration
	heeds   bool // the client heeds the deadline of a context
	most    int
	drifted func(ctx context.Context) // called when the server was in another window
	offset  atomic.Int64              // the server's clock minus ours, in milliseconds

	mu     sync.Mutex
	queue  []*call
	active int
}

// call is what somebody waits for.
type call struct {
	script  *script
	many    bool   // of this script one run serves many calls
	base    string // of the keys
	charges []ratelimit.Charge
	take    bool
	within  int64 // in milliseconds

	now   int64   // by the server's clock
	reply []int64 // what the script says about this call
	err   error

	done chan struct{}
	gone atomic.Bool // nobody waits any more: do not send it
}

var (
	errTimeout = errors.New("no answer in time")
	errCrowded = errors.New("too many callers wait")
)

// heedsDeadlines reports whether the client's calls end when their context's
// deadline says so.
func heedsDeadlines(client redis.UniversalClient) bool {
	switch c := client.(type) {
	case *redis.Client:
		return c.Options().ContextTimeoutEnabled
	case *redis.ClusterClient:
		return c.Options().ContextTimeoutEnabled
	}
	return false
}

// do has a call answered, until the timeout has passed or ctx ends.
func (l *lanes) do(ctx context.Context, c *call) error {
	alone, err := l.enter(ctx, c)
	if err != nil {
		return err
	}
	if alone {
		defer l.leave(ctx)
		l.send(ctx, []*call{c})
		return c.err
	}
	timer := time.NewTimer(l.timeout)
	defer timer.Stop()
	select {
	case <-c.done:
		return c.err
	case <-ctx.Done():
		c.gone.Store(true)
		return ctx.Err()
	case <-timer.C:
		c.gone.Store(true)
		return errTimeout
	}
}

// enter queues a call, or reports that the caller is alone with a lane and may
// send it.
func (l *lanes) enter(ctx context.Context, c *call) (alone bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.queue) >= maxQueue {
		return false, errCrowded
	}
	if l.heeds && len(l.queue) == 0 && l.active < l.most {
		l.active++
		return true, nil
	}
	c.done = make(chan struct{})
	l.queue = append(l.queue, c)
	if l.active < l.most {
		l.active++
		go l.serve(context.WithoutCancel(ctx))
	}
	return false, nil
}

// leave gives the caller's lane to those who wait.
func (l *lanes) leave(ctx context.Context) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.queue) > 0 {
		go l.serve(context.WithoutCancel(ctx))
		return
	}
	l.active--
}

// serve sends what is queued until nothing is.
func (l *lanes) serve(ctx context.Context) {
	for {
		batch := l.next()
		if batch == nil {
			return
		}
		l.send(ctx, batch)
		for _, c := range batch {
			close(c.done)
		}
	}
}

// next takes a batch from the queue. If there is none, the lane is closed.
func (l *lanes) next() (batch []*call) {
	l.mu.Lock()
	defer l.mu.Unlock()
	taken := 0
	for _, c := range l.queue {
		if len(batch) == maxBatch {
			break
		}
		taken++
		if !c.gone.Load() {
			batch = append(batch, c)
		}
	}
	l.queue = l.queue[taken:]
	if len(l.queue) == 0 {
		l.queue = nil
	}
	if batch == nil {
		l.active--
	}
	return batch
}
