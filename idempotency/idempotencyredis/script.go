package idempotencyredis

import (
	"context"
	"errors"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/internal/redisconn"
)

// script is a script and its name on the server.
type script struct{ source, sha string }

func newScript(source string) script { return script{source, redis.NewScript(source).Hash()} }

// call is one run of a script and, later, its reply.
type call struct {
	script script
	args   []any // of EVALSHA; the first two are filled in
	cmd    *redis.Cmd
}

// run runs a script on the record of the claim's key, and its lock. With guarded it
// spares a server that has not answered lately.
func (s *Store) run(ctx context.Context, guarded bool, script script, claim driver.Claim, args ...any) (reply any, err error) {
	record, lock := s.names(claim.Key)
	err = s.server.Ask(ctx, guarded, func(ctx context.Context) (err error) {
		// Each try has a call of its own: that of an earlier one may be on its way.
		c := &call{script: script, args: append([]any{"", "", 2, record, lock}, args...)}
		if err = s.carry(ctx, c); err == nil {
			reply, err = c.cmd.Result()
		}
		if err != nil && !answered(err) {
			redisconn.Failed(ctx, s.client, err)
			s.idle.Test(ctx, record)
		}
		return err
	})
	return reply, err
}

// carry has the call answered, unless ctx ends before.
func (s *Store) carry(ctx context.Context, c *call) error {
	if s.lanes != nil {
		return s.lanes.Do(ctx, c)
	}
	_, err := within(ctx, func(ctx context.Context) (struct{}, error) {
		s.send(ctx, []*call{c})
		return struct{}{}, nil
	})
	return err
}

// within returns when ctx ends, also if the client ignores that.
func within[T any](ctx context.Context, ask func(ctx context.Context) (T, error)) (T, error) {
	type result struct {
		value T
		err   error
	}
	done := make(chan result, 1)
	go func() {
		value, err := ask(ctx)
		done <- result{value, err}
	}()
	select {
	case r := <-done:
		return r.value, r.err
	case <-ctx.Done():
		var none T
		return none, ctx.Err()
	}
}

// answered reports whether an error is Redis's own answer.
func answered(err error) bool {
	answer := redis.Error(nil)
	return errors.As(err, &answer)
}

// send leaves the replies in the calls. Every script may run again, so that the
// client may repeat a trip that broke off.
func (s *Store) send(ctx context.Context, batch []*call) {
	if len(batch) == 1 {
		_ = s.client.Process(ctx, batch[0].byName(ctx)) // the command holds the error
	} else {
		pipe := s.client.Pipeline()
		for _, c := range batch {
			_ = pipe.Process(ctx, c.byName(ctx)) // queues it
		}
		_, _ = pipe.Exec(ctx) // the commands hold the errors
	}
	for _, c := range batch {
		if err := c.cmd.Err(); err != nil && strings.HasPrefix(err.Error(), "NOSCRIPT") {
			_ = s.client.Process(ctx, c.command(ctx, "eval", c.script.source))
		}
	}
}

func (c *call) byName(ctx context.Context) *redis.Cmd {
	return c.command(ctx, "evalsha", c.script.sha)
}

func (c *call) command(ctx context.Context, name, script string) *redis.Cmd {
	c.args[0], c.args[1] = name, script
	c.cmd = redis.NewCmd(ctx, c.args...)
	return c.cmd
}
