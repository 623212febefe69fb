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
// The key of a message is outbox:processed:<message id>, or
// outbox:processed:<namespace>:<message id> when there is a namespace. Consumers that share a
// Redis must have different ones, or they take each other's messages for processed. Before
// the handler the key is claimed (SET NX, value processing:<token>) with a short lease that is
// prolonged while the handler runs. After it the key becomes done:<token> for 8 days, or is
// removed when the handler failed, so that a retry may claim it. A token, new for each
// delivery, keeps a holder that lost its claim from removing that of another.
//
// A message whose key says done is skipped and counts as done. So does one whose key holds
// something else than this package writes, such as a set or another text: that is how other
// systems note what they have processed. A message that is claimed by another delivery is
// postponed, never acknowledged: if the other one dies its claim runs out.

// settleTimeout bounds the commands that end a claim; a context that has ended does not stop them.
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

// state is what take found.
type state int

const (
	stateClaimed state = iota // by this claim
	stateTaken                // by another one
	stateDone
)

// claim is one delivery's hold on a message.
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
	claimPrefix = "processing:" // known to the scripts, too
	doneMark    = "done:"       // without a token: nobody holds a claim
)

// processing reports whether a key's value is a claim; any other says that the message is done.
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

// keep prolongs the claim three times per lease until stop is called, which waits for it.
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
		c.log(err).WarnContext(ctx, "inbox: claim of a message not prolonged")
	}
}

// done marks the message as processed. Its effect has been taken, so a failure is only logged.
func (c *claim) done(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTimeout)
	defer cancel()
	held, err := c.run(ctx, doneScript, c.value, c.mark, c.p.cfg.Retention.Milliseconds())
	if err != nil || held == 0 {
		c.log(err).WarnContext(ctx, "inbox: message processed without a claim to the end: a copy may take effect, too")
	}
}

// release lets a retry claim the message. If that fails the lease runs out.
func (c *claim) release(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTimeout)
	defer cancel()
	if _, err := c.run(ctx, releaseScript, c.value); err != nil {
		c.log(err).WarnContext(ctx, "inbox: claim of a failed message not released")
	}
}

// abandon gives up a claim that Redis may have made without answering: its lease would keep the
// message from being processed.
func (c *claim) abandon(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), tryTimeout)
	defer cancel()
	if _, err := c.run(ctx, releaseScript, c.value); err != nil {
		c.log(err).DebugContext(ctx, "inbox: claim that was not answered not released")
	}
}

func (c *claim) log(err error) *slog.Logger {
	return c.p.cfg.Logger.With(slog.Any("id", c.m.ID), slog.String("name", c.m.Name), slog.Any("error", err))
}

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
	within, cancel := context.WithTimeout(ctx, tryTimeout)
	defer cancel() // not before the reply is taken: an end of within would count as its absence
	n, err := redisconn.Leave(within, func(ctx context.Context) (int64, error) {
		return script.Run(ctx, c.p.client, c.keys, args...).Int64()
	})
	timeout, _ := errors.AsType[net.Error](err) // ours, or one of the client's own
	if timeout != nil && timeout.Timeout() && ctx.Err() == nil {
		return 0, fmt.Errorf("%w in time: %w", errSilent, err)
	}
	return n, err
}
