package ratelimitredis

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/ratelimit"
)

// maxTries bounds how often a script is sent: once more because the server does not know it, and
// because the server is in another window than the client thought. The first answer tells the time,
// so a second miss needs a clock that jumps.
const maxTries = 4

var errDrift = errors.New("the server's clock jumps")

// call is one question to Redis, for which a caller waits.
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
}

// eval is one run of a script, for one call or many.
type eval struct {
	script *script
	calls  []*call
	inFull bool // send the source: the server does not know the script
	cmd    *redis.IntSliceCmd

	// What a first try learned of the clock. Nodes of a cluster have clocks of their own, and another
	// call may have asked another node since.
	drifted bool
	offset  int64
}

// evalsFor bundles the calls that one run can serve. All are in one slot.
func evalsFor(batch []*call) (evals []*eval) {
	for _, c := range batch {
		e := matching(evals, c)
		if e == nil {
			e = &eval{script: c.script}
			evals = append(evals, e)
		}
		e.calls = append(e.calls, c)
	}
	return evals
}

func matching(evals []*eval, c *call) *eval {
	if c.many {
		for _, e := range evals {
			if e.script == c.script {
				return e
			}
		}
	}
	return nil
}

// once is a command that the client must not repeat when a connection breaks: it may have taken
// effect.
type once struct{ *redis.IntSliceCmd }

// NoRetry implements redis.Cmder.
func (once) NoRetry() bool { return true }

// sender runs scripts.
type sender struct {
	client  redis.UniversalClient
	drifted func(ctx context.Context) // called when the server was in another window
	offset  atomic.Int64              // the server's clock minus ours, in milliseconds
}

// send leaves the outcome in the calls.
func (s *sender) send(ctx context.Context, batch []*call) {
	evals := evalsFor(batch)
	for range maxTries {
		s.pipe(ctx, evals)
		var again []*eval
		for _, e := range evals {
			if s.again(ctx, e) {
				again = append(again, e)
			}
		}
		if evals = again; len(evals) == 0 {
			return
		}
	}
}

func (s *sender) pipe(ctx context.Context, evals []*eval) {
	now, offset := time.Now().UnixMilli(), s.offset.Load()
	for _, e := range evals {
		if !e.drifted {
			e.offset = offset
		}
		e.cmd = redis.NewIntSliceCmd(ctx, e.args(now+e.offset)...)
	}
	if len(evals) == 1 {
		_ = s.client.Process(ctx, once{evals[0].cmd}) // the command holds the error
		return
	}
	pipe := s.client.Pipeline()
	for _, e := range evals {
		_ = pipe.Process(ctx, once{e.cmd}) // queues it
	}
	_, _ = pipe.Exec(ctx) // the commands hold the errors
}

func (e *eval) args(now int64) []any {
	head := []any{"evalsha", e.script.sha}
	if e.inFull {
		head = []any{"eval", e.script.source}
	}
	if e.calls[0].many {
		return decideArgs(head, e.calls, now)
	}
	return refundArgs(head, e.calls[0], now)
}

// again reports whether to send the run once more. If not, its calls have their outcome.
func (s *sender) again(ctx context.Context, e *eval) bool {
	reply, err := e.cmd.Result()
	switch {
	case err != nil && !e.inFull && strings.HasPrefix(err.Error(), "NOSCRIPT"):
		e.inFull = true
		return true
	case err == nil && len(reply) < 2:
		err = fmt.Errorf("script answered %d numbers", len(reply))
	case err == nil:
		offset := reply[0] - time.Now().UnixMilli()
		s.offset.Store(offset)
		if reply[1] < 0 {
			e.drifted, e.offset = true, offset
			s.drifted(ctx)
			e.settle(nil, 0, errDrift)
			return true
		}
		e.settle(reply[2:], reply[0], nil)
		return false
	}
	e.settle(nil, 0, err)
	return false
}

// settle gives each call its part of the reply.
func (e *eval) settle(reply []int64, now int64, err error) {
	for _, c := range e.calls {
		c.now, c.err = now, err
		if err != nil || !c.many {
			continue
		}
		n := 1 + 2*len(c.charges)
		if len(reply) < n {
			c.err = fmt.Errorf("script answered %d numbers too few", n-len(reply))
			continue
		}
		c.reply, reply = reply[:n], reply[n:]
	}
}
