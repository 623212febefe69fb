package idempotencyredis

import (
	"context"
	"strings"

	"github.com/redis/go-redis/v9"
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
