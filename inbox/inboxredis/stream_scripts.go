package inboxredis

import (
	"context"
	_ "embed"

	"github.com/redis/go-redis/v9"
)

var (
	//go:embed stream_hold.lua
	holdLua string
	//go:embed stream_leave.lua
	leaveLua string
	//go:embed stream_own.lua
	ownLua string
	//go:embed stream_take.lua
	takeLua string
	//go:embed stream_move.lua
	moveLua string
	//go:embed stream_due.lua
	dueLua string
	//go:embed stream_trim.lua
	trimLua string
	//go:embed stream_forget.lua
	forgetLua string
	//go:embed stream_return.lua
	returnLua string
	//go:embed stream_share.lua
	shareLua string
	//go:embed stream_page.lua
	pageLua string
	//go:embed stream_depth.lua
	depthLua string

	holdScript   = redis.NewScript(holdLua)
	leaveScript  = redis.NewScript(leaveLua)
	ownScript    = redis.NewScript(ownLua)
	takeScript   = redis.NewScript(takeLua)
	moveScript   = redis.NewScript(moveLua)
	dueScript    = redis.NewScript(dueLua)
	trimScript   = redis.NewScript(trimLua)
	forgetScript = redis.NewScript(forgetLua)
	returnScript = redis.NewScript(returnLua)
	shareScript  = redis.NewScript(shareLua)
	pageScript   = redis.NewScript(pageLua)
	depthScript  = redis.NewScript(depthLua)
)

// once is a command that the client must not repeat: the second one would find what the first has
// done.
type once struct{ *redis.Cmd }

// NoRetry implements redis.Cmder.
func (once) NoRetry() bool { return true }

// doOnce runs a command that the client must not repeat.
func doOnce(ctx context.Context, client redis.UniversalClient, args ...any) (any, error) {
	cmd := redis.NewCmd(ctx, args...)
	if err := client.Process(ctx, once{cmd}); err != nil {
		return nil, err
	}
	return cmd.Result()
}

// runOnce runs a script that the client must not repeat.
func runOnce(ctx context.Context, client redis.UniversalClient, script *redis.Script, keys []string, args ...any) (any, error) {
	all := []any{"evalsha", script.Hash(), len(keys)}
	for _, k := range keys {
		all = append(all, k)
	}
	all = append(all, args...)
	reply, err := doOnce(ctx, client, all...)
	if redis.HasErrorPrefix(err, "NOSCRIPT") {
		if err := script.Load(ctx, client).Err(); err != nil {
			return nil, err
		}
		return doOnce(ctx, client, all...)
	}
	return reply, err
}
