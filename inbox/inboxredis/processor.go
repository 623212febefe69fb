package inboxredis

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/redisconn"
)

const (
	keyPrefix = "outbox:processed:"

	defaultLease = 60 * time.Second
	minLease     = time.Second

	maxNamespaceBytes = 64
)

// errInProgress is inside the result of a message that another delivery is working on.
var errInProgress = errors.New("inboxredis: another delivery of this message is being processed")

// ProcessorConfig configures a Processor. The zero value works for one consumer per Redis.
type ProcessorConfig struct {
	// Namespace tells consumers apart that share a Redis: 1 to 64 of a-z, A-Z, 0-9, dot,
	// hyphen and underscore. Default: none, which gives the keys outbox:processed:<message id>.
	Namespace string
	// Retention is how long a processed message is remembered; at least Lease. Default: that of
	// the next processor if it deduplicates, else 8 days.
	Retention time.Duration
	// Lease is how long a claim outlives a process that died with it; at least 1 s. It is
	// prolonged while the handler runs. Where the next processor deduplicates nothing is
	// claimed. Default: 60 s.
	Lease time.Duration
	// Logger receives what goes wrong after a handler has succeeded. Default: slog.Default().
	Logger *slog.Logger
}

func (c ProcessorConfig) withDefaults(next inbox.Processor) ProcessorConfig {
	if d, ok := next.(driver.Deduplicator); ok {
		c.Retention = cmp.Or(c.Retention, d.Retention())
	}
	c.Retention = cmp.Or(c.Retention, max(driver.DefaultRetention, c.Lease))
	c.Lease = cmp.Or(c.Lease, min(defaultLease, max(c.Retention, minLease)))
	c.Logger = cmp.Or(c.Logger, slog.Default())
	return c
}

func (c ProcessorConfig) validate() error {
	var problems []error
	if !validNamespace(c.Namespace) {
		problems = append(problems, fmt.Errorf("inboxredis: ProcessorConfig.Namespace %.70q is not of at most %d letters, digits, dots, hyphens and underscores", c.Namespace, maxNamespaceBytes))
	}
	if c.Lease < minLease {
		problems = append(problems, fmt.Errorf("inboxredis: ProcessorConfig.Lease %v is shorter than %v", c.Lease, minLease))
	}
	if c.Retention < c.Lease {
		problems = append(problems, fmt.Errorf("inboxredis: ProcessorConfig.Retention %v is shorter than Lease %v", c.Retention, c.Lease))
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
	cfg    ProcessorConfig
	prefix string
	idle   *redisconn.Idle

	shortcut *shortcut // where next deduplicates; else nil
}

// These are all that a consumer looks for in a processor. One that were missing would hide that of the
// next processor.
var (
	_ driver.Deduplicator = (*Processor)(nil)
	_ driver.Limiter      = (*Processor)(nil)
	_ driver.Background   = (*Processor)(nil)
	_ driver.Pausable     = (*Processor)(nil)
	_ driver.Parker       = (*Processor)(nil)
)

// NewProcessor returns a Processor that has next do the work. It does not look at Redis.
//
// If next deduplicates by itself, as *inboxpgx.Store does, Redis only spares it the copies that
// are known there, and everything else is for next. Otherwise each message is claimed in Redis
// around next.
func NewProcessor(client redis.UniversalClient, next inbox.Processor, cfg ProcessorConfig) (*Processor, error) {
	cfg = cfg.withDefaults(next)
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
	p := &Processor{
		client: client, next: next, cfg: cfg, prefix: prefix,
		idle: &redisconn.Idle{Client: client, Timeout: tryTimeout},
	}
	if _, ok := next.(driver.Deduplicator); ok {
		p.shortcut = newShortcut(p)
	}
	return p, nil
}

// Ledger implements driver.Deduplicator: it is that of the next processor, if it has one.
func (p *Processor) Ledger() driver.Ledger {
	if d, ok := p.next.(driver.Deduplicator); ok {
		return d.Ledger()
	}
	return nil
}

// Park implements driver.Parker: it is for the next processor, if that stops keys.
func (p *Processor) Park(cfg inbox.ConsumerConfig) {
	if d, ok := p.next.(driver.Parker); ok {
		d.Park(cfg)
	}
}

// Parked implements driver.Parker: it returns the letters of the next processor, if it has some.
func (p *Processor) Parked() driver.DeadLetters {
	if d, ok := p.next.(driver.Parker); ok {
		return d.Parked()
	}
	return nil
}

// Stop implements driver.Parker: the next processor keeps the letter.
func (p *Processor) Stop(ctx context.Context, dead inbox.DeadLetter) error {
	if d, ok := p.next.(driver.Parker); ok {
		return d.Stop(ctx, dead)
	}
	return errors.New("inboxredis: the next Processor does not stop keys")
}

// Retention implements driver.Deduplicator: where the next processor deduplicates, its retention
// counts.
func (p *Processor) Retention() time.Duration {
	if d, ok := p.next.(driver.Deduplicator); ok {
		return d.Retention()
	}
	return p.cfg.Retention
}

// Limit implements driver.Limiter: it is that of the next processor, if it has one.
func (p *Processor) Limit(name string) int {
	if l, ok := p.next.(driver.Limiter); ok {
		return l.Limit(name)
	}
	return 0
}

// Configured implements driver.Configured: it is that of the next processor, if it has one.
func (p *Processor) Configured() error {
	if c, ok := p.next.(driver.Configured); ok {
		return c.Configured()
	}
	return nil
}

// Background implements driver.Background: it runs that of the next processor.
func (p *Processor) Background(ctx context.Context) {
	if b, ok := p.next.(driver.Background); ok {
		b.Background(ctx)
	}
}

// Process implements inbox.Processor: one message after the other, unless the next processor
// deduplicates and gets them together.
func (p *Processor) Process(ctx context.Context, msgs []*inbox.Message) []error {
	if p.shortcut != nil {
		return p.shortcut.process(ctx, msgs)
	}
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
		return nil
	case state == stateTaken:
		return inbox.Postpone(errInProgress, 0)
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
