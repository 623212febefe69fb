package inboxredis

import (
	"context"
	"crypto/rand"
	_ "embed"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/redisconn"
)

// How the claim of a message works.
//
// The key of a message is outbox:processed:<message id>, or outbox:processed:<namespace>:<message id> with a
// namespace. Consumers that share a Redis need different namespaces; otherwise they skip each other's messages.
// Before the handler runs, the key is claimed (SET NX, value processing:<token>) with a short lease, which is
// extended while the handler runs. After success the key becomes done:<token> for 8 days. After a failure it is
// removed, so that a retry can claim it. Each delivery has a new token, so a holder that lost its claim cannot
// remove another's claim.
//
// A message whose key is done is skipped and counts as done. So is a message whose key has any value that this
// package does not write, such as a set or another text, because other systems mark processed messages like that.
// A message that another delivery has claimed is postponed, never acknowledged: if the other process crashes, its
// claim expires.

// settleTimeout bounds the commands that end a claim. They run even after the context has ended.
const settleTimeout = 5 * time.Second

var (
	//go:embed claim.lua
	claimLua string
	//go:embed extend.lua
	extendLua string
	//go:embed done.lua
	doneLua string
	//go:embed release.lua
	releaseLua string

	claimScript   = redis.NewScript(claimLua)
	extendScript  = redis.NewScript(extendLua)
	doneScript    = redis.NewScript(doneLua)
	releaseScript = redis.NewScript(releaseLua)
)

// state is the state that take found.
type state int

const (
	stateClaimed state = iota // by this claim
	stateTaken                // by another one
	stateDone
)

// claim is the claim of one delivery on a message.
type claim struct {
	p     *Processor
	m     *inbox.Message
	keys  []string
	value string // while processing
	mark  string // when done
}

func newClaim(p *Processor, m *inbox.Message) *claim {
	token := rand.Text()
	return &claim{p: p, m: m, keys: []string{p.prefix + m.ID.String()}, value: claimPrefix + token, mark: "done:" + token}
}

const (
	claimPrefix = "processing:" // also in the scripts
	doneMark    = "done:"       // without a token: nobody holds a claim
)

// processing reports whether a key's value is a claim. Any other value means that the message is done.
func processing(value string) bool { return strings.HasPrefix(value, claimPrefix) }

func (c *claim) take(ctx context.Context) (state, error) {
	n, err := c.run(ctx, claimScript, c.value, c.p.cfg.Lease.Milliseconds())
	switch {
	case err != nil:
		return 0, fmt.Errorf("inboxredis: claim message: %w", err)
	case n == 0:
		return stateClaimed, nil
	case n < 0:
		return stateDone, nil
	default:
		return stateTaken, nil
	}
}

// keep extends the claim three times per lease until stop is called; stop waits for it.
func (c *claim) keep(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	wg.Go(func() {
		ticker := time.NewTicker(c.p.cfg.Lease / 3)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				c.extend(ctx)
			case <-ctx.Done():
				return
			}
		}
	})
	return sync.OnceFunc(func() {
		cancel()
		wg.Wait()
	})
}

func (c *claim) extend(ctx context.Context) {
	attempt, cancel := context.WithTimeout(ctx, c.p.cfg.Lease/3)
	defer cancel()
	held, err := c.run(attempt, extendScript, c.value, c.p.cfg.Lease.Milliseconds())
	if ctx.Err() == nil && (err != nil || held == 0) {
		c.log(err).WarnContext(ctx, "inbox: claim not extended")
	}
}

// done marks the message as processed. The handler has succeeded, so a failure is only logged.
func (c *claim) done(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTimeout)
	defer cancel()
	held, err := c.run(ctx, doneScript, c.value, c.mark, c.p.cfg.Retention.Milliseconds())
	if err != nil || held == 0 {
		c.log(err).WarnContext(ctx, "inbox: claim expired while processing; duplicate possible")
	}
}

// release lets a retry claim the message. If it fails, the lease expires.
func (c *claim) release(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTimeout)
	defer cancel()
	if _, err := c.run(ctx, releaseScript, c.value); err != nil {
		c.log(err).WarnContext(ctx, "inbox: claim of failed message not released")
	}
}

// abandon releases a claim that Redis may have made without answering. Otherwise its lease would delay the
// message.
func (c *claim) abandon(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), tryTimeout)
	defer cancel()
	if _, err := c.run(ctx, releaseScript, c.value); err != nil {
		c.log(err).DebugContext(ctx, "inbox: unanswered claim not released")
	}
}

func (c *claim) log(err error) *slog.Logger {
	return c.p.cfg.Logger.With(slog.Any("id", c.m.ID), slog.String("name", c.m.Name), slog.Any("error", err))
}

const (
	// tryTimeout is the time that one connection has to answer.
	tryTimeout = 2 * time.Second

	// tries is the number of attempts for a script that is not answered, each on another connection.
	tries = 2
)

var errSilent = errors.New("inboxredis: Redis does not answer")

// run runs a script of the claim. Each script can be repeated when its answer was lost.
func (c *claim) run(ctx context.Context, script *redis.Script, args ...any) (n int64, err error) {
	for range tries {
		n, err = c.once(ctx, script, args)
		redisconn.Failed(ctx, c.p.client, err)
		if !errors.Is(err, errSilent) {
			break
		}
		c.p.idle.Test(ctx, c.keys[0]) // if one connection is silent, others often are too
	}
	return n, err
}

// once abandons a call that is not answered in time, because the client may ignore the deadline
// (redis.Options.ContextTimeoutEnabled).
func (c *claim) once(ctx context.Context, script *redis.Script, args []any) (int64, error) {
	within, cancel := context.WithTimeout(ctx, tryTimeout)
	defer cancel() // after the reply, because an earlier end of within would count as a timeout
	n, err := redisconn.Leave(within, func(ctx context.Context) (int64, error) {
		return script.Run(ctx, c.p.client, c.keys, args...).Int64()
	})
	timeout, _ := errors.AsType[net.Error](err) // ours, or the client's own
	if timeout != nil && timeout.Timeout() && ctx.Err() == nil {
		return 0, fmt.Errorf("%w in time: %w", errSilent, err)
	}
	return n, err
}
