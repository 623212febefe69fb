package ratelimitredis

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	maxBatch = 128    // scripts in one pipeline: about half a millisecond of the server's time
	maxQueue = 10_000 // scripts that wait; beyond, callers are refused at once
)

// lanes sends scripts to Redis over a few pipelines at a time: what callers ask
// while all are under way travels together in the next. Nobody waits longer than
// they want to, also where the client does not heed its context, and a server
// that does not answer holds a few goroutines, not one per caller.
type lanes struct {
	client  redis.UniversalClient
	timeout time.Duration
	most    int

	mu     sync.Mutex
	queue  []*call
	active int
}

// call is a script that somebody waits for.
type call struct {
	cmd    *redis.IntSliceCmd
	source string // for a server that does not know the script
	done   chan struct{}
	gone   atomic.Bool // nobody waits any more: do not send it
}

// once is a command that the client must not repeat when a connection breaks: it
// may have taken effect.
type once struct{ *redis.IntSliceCmd }

// NoRetry implements redis.Cmder.
func (once) NoRetry() bool { return true }

var (
	errTimeout = errors.New("no answer in time")
	errCrowded = errors.New("too many callers wait")
)

// do runs a script and waits for the answer until giveUp fires or ctx ends.
func (l *lanes) do(ctx context.Context, giveUp <-chan time.Time, source string, args []any) ([]int64, error) {
	c := &call{cmd: redis.NewIntSliceCmd(ctx, args...), source: source, done: make(chan struct{})}
	if err := l.enter(ctx, c); err != nil {
		return nil, err
	}
	select {
	case <-c.done:
		return c.cmd.Result()
	case <-ctx.Done():
		c.gone.Store(true)
		return nil, ctx.Err()
	case <-giveUp:
		c.gone.Store(true)
		return nil, errTimeout
	}
}

func (l *lanes) enter(ctx context.Context, c *call) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.queue) >= maxQueue {
		return errCrowded
	}
	l.queue = append(l.queue, c)
	if l.active < l.most {
		l.active++
		go l.serve(context.WithoutCancel(ctx))
	}
	return nil
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
func (l *lanes) next() []*call {
	l.mu.Lock()
	defer l.mu.Unlock()
	var batch []*call
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

// send runs the scripts, and once more with their source those that the server
// does not know.
func (l *lanes) send(ctx context.Context, batch []*call) {
	ctx, cancel := context.WithTimeout(ctx, l.timeout)
	defer cancel()
	l.pipe(ctx, batch)
	var unknown []*call
	for _, c := range batch {
		if err := c.cmd.Err(); err != nil && strings.HasPrefix(err.Error(), "NOSCRIPT") {
			args := append([]any{"eval", c.source}, c.cmd.Args()[2:]...)
			c.cmd = redis.NewIntSliceCmd(ctx, args...)
			unknown = append(unknown, c)
		}
	}
	if len(unknown) > 0 {
		l.pipe(ctx, unknown)
	}
}

// pipe leaves each call's outcome in its command.
func (l *lanes) pipe(ctx context.Context, batch []*call) {
	if len(batch) == 1 {
		_ = l.client.Process(ctx, once{batch[0].cmd})
		return
	}
	pipe := l.client.Pipeline()
	for _, c := range batch {
		_ = pipe.Process(ctx, once{c.cmd}) // queues it
	}
	_, _ = pipe.Exec(ctx)
}
