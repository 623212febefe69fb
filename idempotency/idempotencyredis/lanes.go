package idempotencyredis

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
	maxLanes = 4      // trips under way
	maxBatch = 128    // calls in one pipeline: about a millisecond of the server's time
	maxQueue = 10_000 // calls that wait; beyond, callers are refused at once
	// laneTimeout ends a pipeline that the client itself does not, which takes
	// a client with ContextTimeoutEnabled. It is longer than most callers wait.
	laneTimeout = 10 * time.Second
)

// lanes sends calls to the server. While few are under way, each goes by itself
// and at once. What is asked while all lanes are taken travels together in the
// next pipeline: for a server and a client that are busy, the trips cost more
// than the scripts. Every call is one script and may be sent again, so that the
// client may repeat a pipeline that broke off.
type lanes struct {
	client redis.UniversalClient
	most   int // 0: each call goes by itself

	mu     sync.Mutex
	active int
	queue  []*call
}

// script is a script and its name on the server.
type script struct{ source, sha string }

func newScript(source string) script { return script{source, redis.NewScript(source).Hash()} }

// call is one run of a script and, later, its reply.
type call struct {
	script script
	args   []any // of EVALSHA; the first two are filled in
	cmd    *redis.Cmd

	done chan struct{}
	gone atomic.Bool // nobody waits any more: do not send it
}

var errCrowded = errors.New("too many callers wait")

// do returns the reply. It returns early when ctx ends while the call waits for
// others, or shares their trip.
func (l *lanes) do(ctx context.Context, c *call) (any, error) {
	if l.most == 0 {
		c.alone(ctx, l.client)
		return c.cmd.Result()
	}
	switch entered, err := l.enter(c); {
	case err != nil:
		return nil, err
	case entered:
		defer l.leave(ctx)
		c.alone(ctx, l.client)
	default:
		select {
		case <-c.done:
		case <-ctx.Done():
			c.gone.Store(true)
			return nil, ctx.Err()
		}
	}
	return c.cmd.Result()
}

// enter takes a lane for the call, or leaves the call in the queue.
func (l *lanes) enter(c *call) (entered bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.active < l.most:
		l.active++
		return true, nil
	case len(l.queue) >= maxQueue:
		return false, errCrowded
	}
	c.done = make(chan struct{})
	l.queue = append(l.queue, c)
	return false, nil
}

// leave gives the lane to those who wait.
func (l *lanes) leave(ctx context.Context) {
	if batch := l.next(); batch != nil {
		go l.serve(context.WithoutCancel(ctx), batch)
	}
}

// serve sends what is queued until nothing is.
func (l *lanes) serve(ctx context.Context, batch []*call) {
	for ; batch != nil; batch = l.next() {
		l.send(ctx, batch)
		for _, c := range batch {
			close(c.done)
		}
	}
}

// next takes a batch from the queue. If there is none, the lane is free again.
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
	if l.queue = l.queue[taken:]; len(l.queue) == 0 {
		l.queue = nil
	}
	if batch == nil {
		l.active--
	}
	return batch
}

// send leaves the replies in the calls.
func (l *lanes) send(ctx context.Context, batch []*call) {
	ctx, cancel := context.WithTimeout(ctx, laneTimeout)
	defer cancel()
	pipe := l.client.Pipeline()
	for _, c := range batch {
		_ = pipe.Process(ctx, c.command(ctx, "evalsha", c.script.sha)) // queues it
	}
	_, _ = pipe.Exec(ctx) // the commands hold the errors
	for _, c := range batch {
		c.teach(ctx, l.client)
	}
}

// alone sends the call by itself.
func (c *call) alone(ctx context.Context, client redis.UniversalClient) {
	_ = client.Process(ctx, c.command(ctx, "evalsha", c.script.sha)) // the command holds the error
	c.teach(ctx, client)
}

// teach sends the script itself if the server does not know it.
func (c *call) teach(ctx context.Context, client redis.UniversalClient) {
	if err := c.cmd.Err(); err != nil && strings.HasPrefix(err.Error(), "NOSCRIPT") {
		_ = client.Process(ctx, c.command(ctx, "eval", c.script.source))
	}
}

func (c *call) command(ctx context.Context, name, script string) *redis.Cmd {
	c.args[0], c.args[1] = name, script
	c.cmd = redis.NewCmd(ctx, c.args...)
	return c.cmd
}
