package inboxredis

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/redisconn"
)

const (
	keyPrefix = "outbox:processed:"

	defaultTTL   = 8 * 24 * time.Hour
	defaultLease = 60 * time.Second
	minLease     = time.Second

	defaultTimeout = 100 * time.Millisecond

	maxNamespaceBytes = 64
)

// ErrInProgress is inside the result of a message that another delivery is working on.
var ErrInProgress = errors.New("inboxredis: another delivery of this message is being processed")

// Config configures a Processor. The zero value is usable by one consumer per Redis.
type Config struct {
	// Namespace tells consumers apart that share a Redis: 1 to 64 of a-z, A-Z, 0-9, dot,
	// hyphen and underscore. Empty gives the keys outbox:processed:<message id>.
	Namespace string
	// TTL is how long a processed message is remembered; at least Lease. 0 means 8 days.
	TTL time.Duration
	// Lease is how long a claim outlives a process that died with it; at least 1 s. It is
	// prolonged while the handler runs. 0 means 60 s.
	Lease time.Duration
	// Timeout is how long a FastPath waits for an answer of Redis before it does without. After
	// three in a row that did not come it asks once a second only, so that a Redis that hangs
	// delays hardly any message. A Processor does not use it. 0 means 100 ms.
	Timeout time.Duration
	// Logger receives what goes wrong after a handler has succeeded; nil means slog.Default().
	Logger *slog.Logger
	// Hooks are optional.
	Hooks Hooks
}

// Hooks are called from the goroutine that processes the message; they must not block.
type Hooks struct {
	// OnDuplicate is called when a message was skipped because it had been processed.
	OnDuplicate func(ctx context.Context, m *inbox.Message)
}

func (c Config) withDefaults() Config {
	if c.TTL == 0 {
		c.TTL = max(defaultTTL, c.Lease)
	}
	if c.Lease == 0 {
		c.Lease = min(defaultLease, max(c.TTL, minLease))
	}
	if c.Timeout == 0 {
		c.Timeout = defaultTimeout
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

func (c Config) validate() error {
	var problems []error
	if !validNamespace(c.Namespace) {
		problems = append(problems, fmt.Errorf("inboxredis: Config.Namespace %.70q is not of at most %d letters, digits, dots, hyphens and underscores", c.Namespace, maxNamespaceBytes))
	}
	if c.Lease < minLease {
		problems = append(problems, fmt.Errorf("inboxredis: Config.Lease %v is shorter than %v", c.Lease, minLease))
	}
	if c.TTL < c.Lease {
		problems = append(problems, fmt.Errorf("inboxredis: Config.TTL %v is shorter than Lease %v", c.TTL, c.Lease))
	}
	if c.Timeout < 0 {
		problems = append(problems, fmt.Errorf("inboxredis: Config.Timeout %v is negative", c.Timeout))
	}
	return errors.Join(problems...)
}

func validNamespace(s string) bool {
	for i := range len(s) {
		c := s[i]
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '.' && c != '-' && c != '_' {
			return false
		}
	}
	return len(s) <= maxNamespaceBytes
}

// Processor is an inbox.Processor that skips messages which were processed before. It is
// safe for concurrent use.
type Processor struct {
	client redis.UniversalClient
	next   inbox.Processor
	cfg    Config
	prefix string
	idle   *redisconn.Idle
}

// NewProcessor returns a Processor that has next do the work. It does not look at Redis.
func NewProcessor(client redis.UniversalClient, next inbox.Processor, cfg Config) (*Processor, error) {
	cfg = cfg.withDefaults()
	problems := []error{cfg.validate()}
	if client == nil {
		problems = append(problems, errors.New("inboxredis: client is nil"))
	}
	if next == nil {
		problems = append(problems, errors.New("inboxredis: next Processor is nil"))
	}
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}
	prefix := keyPrefix
	if cfg.Namespace != "" {
		prefix += cfg.Namespace + ":"
	}
	return &Processor{
		client: client, next: next, cfg: cfg, prefix: prefix,
		idle: &redisconn.Idle{Client: client, Timeout: tryTimeout},
	}, nil
}

// Process implements inbox.Processor, one message after the other.
func (p *Processor) Process(ctx context.Context, msgs []*inbox.Message) []error {
	results := make([]error, len(msgs))
	for i, m := range msgs {
		results[i] = p.one(ctx, m)
	}
	return results
}

func (p *Processor) one(ctx context.Context, m *inbox.Message) error {
	if err := m.Validate(); err != nil {
		return err // without an id there is nothing to claim
	}
	if ctx.Err() != nil {
		return fmt.Errorf("%w: not started: %w", inbox.ErrDraining, context.Cause(ctx))
	}
	c := newClaim(p, m)
	state, err := c.take(ctx)
	switch {
	case errors.Is(err, errSilent):
		c.abandon(ctx)
		return inbox.Unavailable(err)
	case err != nil && errors.Is(context.Cause(ctx), inbox.ErrDraining):
		return fmt.Errorf("%w: %w", inbox.ErrDraining, err)
	case err != nil:
		return inbox.Unavailable(err)
	case state == stateDone:
		if p.cfg.Hooks.OnDuplicate != nil {
			p.cfg.Hooks.OnDuplicate(ctx, m)
		}
		return nil
	case state == stateTaken:
		return inbox.Postpone(ErrInProgress, 0)
	}
	return p.work(ctx, c, m)
}

// work runs the next processor under the claim.
func (p *Processor) work(ctx context.Context, c *claim, m *inbox.Message) error {
	settled := false
	stop := c.keep(ctx)
	defer func() {
		stop()
		if !settled { // the processor panicked
			c.release(ctx)
		}
	}()
	results := p.next.Process(ctx, []*inbox.Message{m})
	stop()
	settled = true
	err := errors.New("inboxredis: next Processor returned not one result for one message")
	if len(results) == 1 {
		err = results[0]
	}
	if err != nil {
		c.release(ctx)
		return err
	}
	c.done(ctx)
	return nil
}
