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
	"github.com/holdfast-go/holdfast/internal/breaker"
	"github.com/holdfast-go/holdfast/internal/redisconn"
)

// Before inboxpgx.
//
// Where the next processor deduplicates by itself, as *inboxpgx.Store does, nothing is claimed.
// Redis is asked first and believed only when it says that a message is done; everything else is
// for the next processor, whose guarantees stay. That saves transactions where many copies come.
// The keys are the same. A consumer also gets the ledger, the pauses and the pruning of the next processor.

// Without Redis.
//
// While Redis cannot be reached no handler runs: the result is inbox.Unavailable, after 6 seconds
// at the latest, whatever the client's own timeouts are. Before inboxpgx messages go on without
// it, after 100 ms at the latest.

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

const (
	// shortcutTimeout is how long the shortcut waits for Redis before it does without. After
	// failuresInARow answers that did not come it asks once a second only, so that a Redis that
	// hangs delays hardly any message. It may be short: where Redis is late nothing fails, and the message
	// costs its transaction.
	shortcutTimeout = 100 * time.Millisecond
	failuresInARow  = 3
	probeEvery      = time.Second
)

var errOpen = errors.New("inboxredis: Redis has not answered of late")

// shortcut skips, by a look at Redis, what the processor behind has processed before, and leaves
// everything else to that one. It saves a transaction per copy, at the price of one round trip to
// Redis per call and one per success.
type shortcut struct {
	p       *Processor
	timeout time.Duration // for an answer of Redis
	breaker *breaker.Breaker
}

func newShortcut(p *Processor) *shortcut {
	return &shortcut{p: p, timeout: shortcutTimeout, breaker: breaker.New(failuresInARow, probeEvery)}
}

// process believes Redis only when it says that a message is done; what it does not know, or when
// it does not answer, is for the processor behind.
func (s *shortcut) process(ctx context.Context, msgs []*inbox.Message) []error {
	done := s.done(ctx, msgs)
	rest, at := make([]*inbox.Message, 0, len(msgs)), make([]int, 0, len(msgs))
	for i, m := range msgs {
		if !done[i] {
			rest, at = append(rest, m), append(at, i)
		}
	}
	results := make([]error, len(msgs))
	if len(rest) == 0 {
		return results
	}
	answers := s.p.next.Process(ctx, rest)
	if len(answers) != len(rest) {
		err := fmt.Errorf("inboxredis: next Processor returned %d results for %d messages", len(answers), len(rest))
		for _, i := range at {
			results[i] = err
		}
		return results
	}
	for k, err := range answers {
		results[at[k]] = err
	}
	s.mark(ctx, rest, answers)
	return results
}

// done asks for all messages in one round trip.
func (s *shortcut) done(ctx context.Context, msgs []*inbox.Message) []bool {
	done := make([]bool, len(msgs))
	asked := make([]*redis.StringCmd, len(msgs))
	pipe := s.p.client.Pipeline()
	for i, m := range msgs {
		if m.Validate() == nil {
			asked[i] = pipe.Get(ctx, s.p.prefix+m.ID.String())
		}
	}
	if pipe.Len() == 0 {
		return done
	}
	if err := s.exec(ctx, pipe, s.p.prefix+msgs[0].ID.String()); err != nil {
		s.p.cfg.Logger.DebugContext(ctx, "inbox: Redis not asked for messages", slog.Any("error", err))
		return done
	}
	for i, answer := range asked {
		if answer == nil {
			continue
		}
		value, err := answer.Result()
		switch {
		case err == nil:
			done[i] = !processing(value)
		case redis.HasErrorPrefix(err, "WRONGTYPE"): // another system's mark
			done[i] = true
		case !errors.Is(err, redis.Nil):
			s.p.cfg.Logger.DebugContext(ctx, "inbox: Redis not asked for a message", slog.Any("id", msgs[i].ID), slog.Any("error", err))
		}
	}
	return done
}

// mark notes what was processed. Without its mark a copy costs the transaction again.
func (s *shortcut) mark(ctx context.Context, msgs []*inbox.Message, answers []error) {
	ctx = context.WithoutCancel(ctx)
	pipe := s.p.client.Pipeline()
	for i, m := range msgs {
		if answers[i] == nil {
			pipe.SetArgs(ctx, s.p.prefix+m.ID.String(), doneMark, redis.SetArgs{Mode: "NX", TTL: s.p.cfg.Retention})
		}
	}
	if pipe.Len() == 0 {
		return
	}
	if err := s.exec(ctx, pipe, s.p.prefix+msgs[0].ID.String()); err != nil {
		s.p.cfg.Logger.DebugContext(ctx, "inbox: processed messages not marked in Redis", slog.Any("error", err))
	}
}

// exec runs the commands, each of which keeps its own error, and returns an error unless Redis
// has answered in time. The client need not mind the deadline (redis.Options.ContextTimeoutEnabled),
// so a call is left behind, and its commands must not be looked at then. key is one of theirs.
func (s *shortcut) exec(ctx context.Context, pipe redis.Pipeliner, key string) error {
	if !s.breaker.Enter() {
		return errOpen
	}
	within, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel() // not before the answer is taken
	_, err := redisconn.Leave(within, func(ctx context.Context) ([]redis.Cmder, error) { return pipe.Exec(ctx) })
	if _, answered := errors.AsType[redis.Error](err); answered {
		err = nil
	}
	if ctx.Err() == nil { // else nobody waited for the answer
		s.breaker.Done(err == nil)
		if err != nil {
			redisconn.Failed(ctx, s.p.client, err)
			s.p.idle.Test(ctx, key)
		}
	}
	return err
}

// Pause implements driver.Pausable: it pauses the next processor. The error is errors.ErrUnsupported
// where that cannot be paused.
func (p *Processor) Pause(ctx context.Context, by, reason string) error {
	if next, ok := p.next.(driver.Pausable); ok {
		return next.Pause(ctx, by, reason)
	}
	return p.notPausable("pause")
}

// Resume implements driver.Pausable, as Pause does.
func (p *Processor) Resume(ctx context.Context) error {
	if next, ok := p.next.(driver.Pausable); ok {
		return next.Resume(ctx)
	}
	return p.notPausable("resume")
}

// Paused implements driver.Pausable. What cannot be paused is not.
func (p *Processor) Paused(ctx context.Context) (driver.Pause, error) {
	if next, ok := p.next.(driver.Pausable); ok {
		return next.Paused(ctx)
	}
	return driver.Pause{}, nil
}

// WatchPause implements driver.Pausable. A consumer begins nothing before it was told: that there is no
// pause is told, too.
func (p *Processor) WatchPause(ctx context.Context, tell func(driver.Pause)) {
	if next, ok := p.next.(driver.Pausable); ok {
		next.WatchPause(ctx, tell)
		return
	}
	tell(driver.Pause{})
	<-ctx.Done()
}

func (p *Processor) notPausable(what string) error {
	return fmt.Errorf("inboxredis: %s: the next processor is a %T: %w", what, p.next, errors.ErrUnsupported)
}
