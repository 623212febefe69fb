package inboxredis

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/redisconn"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

// returned is the consumer name that holds requeued entries until a consumer claims them.
const returned = "holdfast:returned"

// testPause is how long a timed-out call waits, so that the tests of idle connections can start.
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

// within bounds a call. After a timeout it tests the idle connections, because if one connection is silent, others
// often are too.
func within[T any](ctx context.Context, g *group, call func(context.Context) (T, error)) (T, error) {
	return withinTime(ctx, g, g.cfg.Timeout, call)
}

// withinTime is within with another timeout.
func withinTime[T any](ctx context.Context, g *group, timeout time.Duration, call func(context.Context) (T, error)) (T, error) {
	value, err := redisconn.Within(ctx, timeout, call)
	g.test(ctx, err)
	return value, err
}

// patiently is within for a call that waits on the server for up to block. It ignores cancellation and waits for
// the reply: the client would continue anyway, and entries that the call had read would be delivered late.
func patiently[T any](ctx context.Context, g *group, call func(context.Context) (T, error)) (T, error) {
	value, err := redisconn.Within(context.WithoutCancel(ctx), block+g.cfg.Timeout, call)
	g.test(ctx, err)
	return value, err
}

// test tests the idle connections after a call that timed out. It pauses so that the tests can take the
// connections before the next call does.
func (g *group) test(ctx context.Context, err error) {
	redisconn.Failed(ctx, g.client, err)
	if isTimeout(err) && ctx.Err() == nil {
		g.idle.Test(ctx, g.keys.stream)
		_ = runloop.Sleep(ctx, testPause)
	}
}

// script runs a script that may be repeated.
func (g *group) script(ctx context.Context, script *redis.Script, keys []string, args ...any) (int64, error) {
	return within(ctx, g, func(ctx context.Context) (int64, error) {
		return script.Run(ctx, g.client, keys, args...).Int64()
	})
}

// leave requeues all entries of a consumer name, and removes the name. token is the token of its lease, or "".
func (g *group) leave(ctx context.Context, name, token string) error {
	_, err := g.script(ctx, leaveScript, g.keys.read(), g.cfg.ConsumerConfig.Name, token, name, returned, (claimIdle + time.Millisecond).Milliseconds())
	return err
}

// fault adds the operation and names to an error, and marks errors that Setup fixes.
func (g *group) fault(what string, err error) error {
	switch {
	case err == nil:
		return nil
	case isMissing(err):
		return fmt.Errorf("inboxredis: %s: stream %q, group %q: %w: %w", what, g.keys.stream, g.cfg.ConsumerConfig.Name, driver.ErrMissing, err)
	default:
		return fmt.Errorf("inboxredis: %s: stream %q, group %q: %w", what, g.keys.stream, g.cfg.ConsumerConfig.Name, err)
	}
}

// deleted logs lost messages: MAXLEN or XDEL deleted them while they were pending.
func (g *group) deleted(ctx context.Context, n int) {
	if n > 0 {
		g.log.ErrorContext(ctx, "inbox: messages lost: deleted before they were settled", slog.Int("messages", n))
	}
}

// maxNameBytes bounds the names of streams, groups and consumers.
const maxNameBytes = 512

// keys are the keys that a consumer uses, all in one slot of a Cluster.
type keys struct {
	stream string
	own    string // prefix of the other keys
}

// noColons escapes the separator of the parts of a key.
var noColons = strings.NewReplacer("%", "%25", ":", "%3A")

// newKeys returns the keys of a group. They use the hash tag of the stream, or its whole name if it has none. Two
// groups never share a key, because the escaped names of groups have no colons, and two colons follow a stream
// with its own tag.
func newKeys(stream, group string) (keys, error) {
	switch open := strings.IndexByte(stream, '{'); {
	case stream == "" || len(stream) > maxNameBytes:
		return keys{}, errors.New("the stream's name is empty or longer than 512 bytes")
	case group == "" || len(group) > maxNameBytes:
		return keys{}, errors.New("the group's name is empty or longer than 512 bytes")
	case !strings.ContainsAny(stream, "{}"):
		return keys{stream, "{" + stream + "}:" + noColons.Replace(group) + ":"}, nil
	case open < 0 || strings.IndexByte(stream[open:], '}') < 2:
		return keys{}, errors.New("the stream's name has a brace, but no hash tag such as {orders}")
	default:
		return keys{stream, stream + "::" + noColons.Replace(group) + ":"}, nil
	}
}

// retries is the stream of due retries.
func (k keys) retries() string { return k.own + "retries" }

// later has the waiting retries, by due time.
func (k keys) later() string { return k.own + "later" }

// putOff has the waiting messages that have not failed, by due time.
func (k keys) putOff() string { return k.own + "putoff" }

// waiting returns the key for a waiting message.
func (k keys) waiting(putOff bool) string {
	if putOff {
		return k.putOff()
	}
	return k.later()
}

// owner is the lease of ordered consumers.
func (k keys) owner() string { return k.own + "owner" }

// probe is written to test whether Redis accepts writes.
func (k keys) probe() string { return k.own + "probe" }

// processes has the processes that share this number of partitions, by their last report. It belongs to the first
// partition.
func (k keys) processes(partitions int) string {
	return k.own + "processes." + strconv.Itoa(partitions)
}

// dead is the stream of the dead letters of a class.
func (k keys) dead(prefix, class string) string { return k.own + driver.DeadLetterQueue(prefix, class) }

// read returns the streams to read, and the lease: the keys that most scripts need.
func (k keys) read() []string { return []string{k.stream, k.retries(), k.owner()} }

// index returns 1 for the stream of retries, otherwise 0.
func (k keys) index(stream string) int {
	if stream == k.stream {
		return 0
	}
	return 1
}

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
	//go:embed stream_waiting.lua
	waitingLua string
	//go:embed stream_postpone.lua
	postponeLua string

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

	waitingScript  = redis.NewScript(waitingLua)
	postponeScript = redis.NewScript(postponeLua)
)

// once is a command that the client must not repeat, because the repetition would find the effects of the first
// attempt.
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

// unavailable lists the prefixes of error replies that Redis would give to every move.
var unavailable = []string{
	"OOM ", "MISCONF ", "NOREPLICAS ", "BUSY ", "LOADING ", "READONLY ", "MASTERDOWN ", "CLUSTERDOWN ", "TRYAGAIN ",
	"NOAUTH ", "WRONGPASS ", "DENIED ", "NOGROUP ", "max number of clients", "unknown command",
}

// classify converts the failure of a move to the errors of driver.Source. An error that is not a reply of Redis is
// a network fault.
func classify(err error) error {
	if _, answered := errors.AsType[redis.Error](err); answered {
		for _, begin := range unavailable {
			if redis.HasErrorPrefix(err, begin) {
				return fmt.Errorf("inboxredis: move: %w: %w", driver.ErrUnavailable, err)
			}
		}
		return fmt.Errorf("inboxredis: move: %w: %w", driver.ErrRefused, err)
	}
	return fmt.Errorf("inboxredis: move: %w: %w", driver.ErrUnavailable, err)
}

func isTimeout(err error) bool {
	timeout, ok := errors.AsType[net.Error](err)
	return ok && timeout.Timeout() || errors.Is(err, context.DeadlineExceeded)
}
