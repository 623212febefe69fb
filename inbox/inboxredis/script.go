package inboxredis

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/redisconn"
)

const (
	// tryTimeout is how long one connection may take to answer.
	tryTimeout = 2 * time.Second

	// tries is how often a script is run that is not answered, each time on another connection.
	tries = 2
)

var errSilent = errors.New("inboxredis: Redis does not answer")

// run runs a script of the claim. Each of them may be run again when its answer was lost.
func (c *claim) run(ctx context.Context, script *redis.Script, args ...any) (n int64, err error) {
	for range tries {
		n, err = c.once(ctx, script, args)
		redisconn.Failed(ctx, c.p.client, err)
		if !errors.Is(err, errSilent) {
			break
		}
		c.p.idle.Test(ctx, c.keys[0]) // where one connection is silent there are often more
	}
	return n, err
}

// once leaves a call behind that is not answered in time: the client need not mind the deadline
// (redis.Options.ContextTimeoutEnabled).
func (c *claim) once(ctx context.Context, script *redis.Script, args []any) (int64, error) {
	type reply struct {
		n   int64
		err error
	}
	within, cancel := context.WithTimeout(ctx, tryTimeout)
	defer cancel() // not before the reply is taken: an end of within would count as its absence
	replies := make(chan reply, 1)
	go func() {
		n, err := script.Run(within, c.p.client, c.keys, args...).Int64()
		replies <- reply{n, err}
	}()
	var r reply
	select {
	case r = <-replies:
	case <-within.Done():
		r.err = within.Err()
	}
	timeout, _ := errors.AsType[net.Error](r.err) // ours, or one of the client's own
	if timeout != nil && timeout.Timeout() && ctx.Err() == nil {
		return 0, fmt.Errorf("%w in time: %w", errSilent, r.err)
	}
	return r.n, r.err
}
