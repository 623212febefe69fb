package inboxredis

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/redisconn"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

// returned is the consumer name that holds what was given back, until somebody claims it.
const returned = "holdfast:returned"

// testPause is how long a call that timed out waits for the tests of idle connections to begin.
const testPause = 100 * time.Millisecond

// group is a consumer group of a stream on its server.
type group struct {
	cfg    *settings
	client redis.UniversalClient
	keys   keys
	log    *slog.Logger
	idle   *redisconn.Idle
	pages  *pages
}

func newGroup(client redis.UniversalClient, cfg *settings, k keys) *group {
	return &group{
		cfg: cfg, client: client, keys: k, log: cfg.log.With(slog.String("queue", k.stream)),
		pages: newPages(), idle: &redisconn.Idle{Client: client, Timeout: cfg.Timeout},
	}
}

// within bounds a call. Where one connection has fallen silent there are often more, which are looked
// for.
func within[T any](ctx context.Context, g *group, call func(context.Context) (T, error)) (T, error) {
	return withinTime(ctx, g, g.cfg.Timeout, call)
}

// withinTime is within for a call that has less time than others.
func withinTime[T any](ctx context.Context, g *group, timeout time.Duration, call func(context.Context) (T, error)) (T, error) {
	value, err := redisconn.Within(ctx, timeout, call)
	g.test(ctx, err)
	return value, err
}

// patiently is within for a call that waits on the server for up to block. The client minds no
// cancellation, and what such a call took after it would wait for its next reader: it is waited for.
func patiently[T any](ctx context.Context, g *group, call func(context.Context) (T, error)) (T, error) {
	value, err := redisconn.Within(context.WithoutCancel(ctx), block+g.cfg.Timeout, call)
	g.test(ctx, err)
	return value, err
}

// test looks for silent connections after a call that timed out. It leaves the tests the moment that
// they need to take them, or the next call would.
func (g *group) test(ctx context.Context, err error) {
	redisconn.Failed(ctx, g.client, err)
	if isTimeout(err) && ctx.Err() == nil {
		g.idle.Test(ctx, g.keys.stream)
		_ = runloop.Sleep(ctx, testPause)
	}
}

// script runs one of those that may be repeated.
func (g *group) script(ctx context.Context, script *redis.Script, keys []string, args ...any) (int64, error) {
	return within(ctx, g, func(ctx context.Context) (int64, error) {
		return script.Run(ctx, g.client, keys, args...).Int64()
	})
}

// leave gives back all that a consumer name holds, and removes it. Token is that of its lease; "" for
// none.
func (g *group) leave(ctx context.Context, name, token string) error {
	_, err := g.script(ctx, leaveScript, g.keys.read(), g.cfg.Group, token, name, returned, (claimIdle + time.Millisecond).Milliseconds())
	return err
}

// fault names what failed, and marks what Setup mends.
func (g *group) fault(what string, err error) error {
	switch {
	case err == nil:
		return nil
	case isMissing(err):
		return fmt.Errorf("inboxredis: %s: stream %q, group %q: %w: %w", what, g.keys.stream, g.cfg.Group, driver.ErrMissing, err)
	default:
		return fmt.Errorf("inboxredis: %s: stream %q, group %q: %w", what, g.keys.stream, g.cfg.Group, err)
	}
}

// deleted tells of messages that are lost: MAXLEN or XDEL took them while they were pending.
func (g *group) deleted(ctx context.Context, n int) {
	if n > 0 {
		g.log.ErrorContext(ctx, "inbox: messages lost: they were deleted from the stream before they were settled", slog.Int("messages", n))
	}
}
