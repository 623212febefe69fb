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

// With inboxpgx.
//
// If the next processor deduplicates by itself, as *inboxpgx.Store does, nothing is claimed in Redis. Redis is
// only used to skip messages that are marked as done. All other messages go to the next processor, whose
// guarantees stay. That saves transactions if there are many duplicates. The keys are the same. A consumer also
// gets the ledger, the pauses and the pruning of the next processor.

// Without Redis.
//
// While Redis is unreachable no handler runs: the result is inbox.Unavailable, after at most 6 seconds for any
// timeouts of the client. With inboxpgx messages are processed without Redis, after at most 100 ms.

const (
	keyPrefix = "outbox:processed:"

	defaultLease = 60 * time.Second
	minLease     = time.Second

	maxNamespaceBytes = 64
)

// errInProgress is in the result of a message that another delivery is processing.
var errInProgress = errors.New("inboxredis: another delivery of this message is being processed")

// ProcessorConfig configures a Processor. The zero value works for one consumer per Redis.
type ProcessorConfig struct {
	// Namespace separates consumers that share a Redis: 1 to 64 of a-z, A-Z, 0-9, dot, hyphen and underscore.
	// Default: none; the keys are outbox:processed:<message id>.
	Namespace string
	// Retention is how long a processed message is remembered; at least Lease. Default: the retention of the next
	// processor if it deduplicates, otherwise 8 days.
	Retention time.Duration
	// Lease is the time after which the claim of a crashed process expires; at least 1 s. It is extended while the
	// handler runs. It is not used if the next processor deduplicates. Default: 60 s.
	Lease time.Duration
	// Logger receives errors after a handler has succeeded. Default: slog.Default().
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

// Processor is an inbox.Processor that skips messages that were processed before. It is safe for concurrent use.
type Processor struct {
	client redis.UniversalClient
	next   inbox.Processor
	cfg    ProcessorConfig
	prefix string
	idle   *redisconn.Idle

	shortcut *shortcut // nil unless next deduplicates
}

// Consumers look for these interfaces in a processor. A missing one would hide the next processor's.
var (
	_ driver.Deduplicator = (*Processor)(nil)
	_ driver.Limiter      = (*Processor)(nil)
	_ driver.Background   = (*Processor)(nil)
	_ driver.Pausable     = (*Processor)(nil)
	_ driver.Parker       = (*Processor)(nil)
)

// NewProcessor returns a Processor that runs next. It does not contact Redis.
//
// If next deduplicates by itself, as *inboxpgx.Store does, Redis is only used to skip known duplicates, and next
// processes everything else. Otherwise each message is claimed in Redis before next runs.
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

// Ledger implements driver.Deduplicator: it returns the ledger of the next processor, if it has one.
func (p *Processor) Ledger() driver.Ledger {
	if d, ok := p.next.(driver.Deduplicator); ok {
		return d.Ledger()
	}
	return nil
}

// Park implements driver.Parker: it calls the next processor's Park, if it has one.
func (p *Processor) Park(cfg inbox.ConsumerConfig) {
	if d, ok := p.next.(driver.Parker); ok {
		d.Park(cfg)
	}
}

// Parked implements driver.Parker: it returns the dead letters of the next processor, if it has some.
func (p *Processor) Parked() driver.DeadLetters {
	if d, ok := p.next.(driver.Parker); ok {
		return d.Parked()
	}
	return nil
}

// Stop implements driver.Parker: the next processor stores the dead letter.
func (p *Processor) Stop(ctx context.Context, dead inbox.DeadLetter) error {
	if d, ok := p.next.(driver.Parker); ok {
		return d.Stop(ctx, dead)
	}
	return errors.New("inboxredis: the next Processor does not stop keys")
}

// Retention implements driver.Deduplicator: it returns the retention of the next processor, if that deduplicates.
func (p *Processor) Retention() time.Duration {
	if d, ok := p.next.(driver.Deduplicator); ok {
		return d.Retention()
	}
	return p.cfg.Retention
}

// Limit implements driver.Limiter: it returns the limit of the next processor, if it has one.
func (p *Processor) Limit(name string) int {
	if l, ok := p.next.(driver.Limiter); ok {
		return l.Limit(name)
	}
	return 0
}

// Configured implements driver.Configured: it calls the next processor's Configured, if it has one.
func (p *Processor) Configured() error {
	if c, ok := p.next.(driver.Configured); ok {
		return c.Configured()
	}
	return nil
}

// Background implements driver.Background: it runs the next processor's Background.
func (p *Processor) Background(ctx context.Context) {
	if b, ok := p.next.(driver.Background); ok {
		b.Background(ctx)
	}
}

// Process implements inbox.Processor. It processes one message after the other, unless the next processor
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
	// shortcutTimeout is how long the shortcut waits for Redis. After failuresInARow timeouts it asks only once a
	// second, so that a hanging Redis delays few messages. It may be short: if Redis is late, nothing fails, and
	// the message only costs its transaction.
	shortcutTimeout = 100 * time.Millisecond
	failuresInARow  = 3
	probeEvery      = time.Second
)

var errOpen = errors.New("inboxredis: Redis has not answered recently")

// shortcut skips messages that Redis knows as processed, and passes everything else to the next processor. It
// saves a transaction per duplicate, for one round trip to Redis per call and one per success.
type shortcut struct {
	p       *Processor
	timeout time.Duration // for a reply of Redis
	breaker *breaker.Breaker
}

func newShortcut(p *Processor) *shortcut {
	return &shortcut{p: p, timeout: shortcutTimeout, breaker: breaker.New(failuresInARow, probeEvery)}
}

// process skips only messages that are marked as done. If the mark is missing or Redis does not answer, the next
// processor gets the message.
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

// done reads the marks of all messages in one round trip.
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
		s.p.cfg.Logger.DebugContext(ctx, "inbox: skipped Redis duplicate check", slog.Any("error", err))
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
			s.p.cfg.Logger.DebugContext(ctx, "inbox: skipped Redis duplicate check of message", slog.Any("id", msgs[i].ID), slog.Any("error", err))
		}
	}
	return done
}

// mark marks processed messages. Without its mark a duplicate costs a transaction again.
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

// exec runs the commands, each of which keeps its own error, and returns an error unless Redis has answered in
// time. The client may ignore the deadline (redis.Options.ContextTimeoutEnabled), so a late call is abandoned; its
// commands must not be read then. key is one of their keys.
func (s *shortcut) exec(ctx context.Context, pipe redis.Pipeliner, key string) error {
	if !s.breaker.Enter() {
		return errOpen
	}
	within, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel() // after the reply
	_, err := redisconn.Leave(within, func(ctx context.Context) ([]redis.Cmder, error) { return pipe.Exec(ctx) })
	if _, answered := errors.AsType[redis.Error](err); answered {
		err = nil
	}
	if ctx.Err() == nil { // otherwise nobody waited for the reply
		s.breaker.Done(err == nil)
		if err != nil {
			redisconn.Failed(ctx, s.p.client, err)
			s.p.idle.Test(ctx, key)
		}
	}
	return err
}

// Pause implements driver.Pausable: it pauses the next processor. The error is errors.ErrUnsupported if that
// cannot be paused.
func (p *Processor) Pause(ctx context.Context, by, reason string) error {
	if next, ok := p.next.(driver.Pausable); ok {
		return next.Pause(ctx, by, reason)
	}
	return p.notPausable("pause")
}

// Resume implements driver.Pausable, like Pause.
func (p *Processor) Resume(ctx context.Context) error {
	if next, ok := p.next.(driver.Pausable); ok {
		return next.Resume(ctx)
	}
	return p.notPausable("resume")
}

// Paused implements driver.Pausable. A processor that cannot be paused is not paused.
func (p *Processor) Paused(ctx context.Context) (driver.Pause, error) {
	if next, ok := p.next.(driver.Pausable); ok {
		return next.Paused(ctx)
	}
	return driver.Pause{}, nil
}

// WatchPause implements driver.Pausable. A consumer starts nothing before the first call of tell, so WatchPause
// also calls it if there is no pause.
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
