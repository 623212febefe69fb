package outbox

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/internal/backoff"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/telemetry"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// Relay publishes the messages of a store through the publishers of their transports. Any number of relays
// may work on one store, in one process or in many. Its methods are safe for concurrent use.
type Relay struct {
	source     driver.Source
	transports transports
	cfg        RelayConfig
	pauses     backoff.Policy // of a store or a transport that is unavailable
	telemetry  instruments
	wake       bell
	log        journal
	health     *health
	rounds     *rounds
}

// unavailable is the backoff for an unavailable store or transport. Its delays are short, because a pause
// always ends later than the fault that caused it.
var unavailable = backoff.Policy{Base: 200 * time.Millisecond, Max: 2 * time.Second, Jitter: 0.5}

// NewRelay returns a Relay between a store and the publisher of the default transport. It returns an error for
// an invalid cfg. Call Run or Drain to publish.
func NewRelay(store driver.Source, publisher driver.Publisher, cfg RelayConfig) (*Relay, error) {
	cfg = cfg.withDefaults()
	errs := []error{cfg.validate()}
	if store == nil {
		errs = append(errs, errors.New("outbox: NewRelay needs a store"))
	}
	if publisher == nil {
		errs = append(errs, errors.New("outbox: NewRelay needs a publisher"))
	}
	publishers := map[string]driver.Publisher{}
	maps.Copy(publishers, cfg.Transports)
	publishers[""] = publisher
	log := newJournal(cfg.Logger)
	for _, p := range publishers {
		if p, ok := p.(*PublisherFunc); ok {
			errs = append(errs, p.validate())
			p.logTo(log)
		}
	}
	instruments, err := newInstruments(store, publishers, cfg)
	if err := errors.Join(append(errs, err)...); err != nil {
		return nil, err
	}
	r := &Relay{
		source: store, transports: transports{}, cfg: cfg, pauses: unavailable, telemetry: instruments,
		wake: make(bell, 1), log: log, health: &health{},
	}
	for name, p := range publishers {
		r.transports[name] = &transport{name: name, publisher: p, breaker: breaker{delay: r.pauseDelay}, log: r.log}
	}
	r.rounds = &rounds{source: store, transports: r.transports, cfg: cfg, telemetry: instruments, log: r.log, health: r.health}
	return r, nil
}

// Run publishes until ctx ends. It also keeps the publishers' connections, listens for commits in other
// processes and prunes the store, as far as these need it. Faults of the store and the brokers do not end
// it: it logs, counts and retries them with a growing pause. At present it always returns nil.
//
// When ctx ends, Run publishes the messages of earlier wake-ups, waits for the confirms of messages in
// flight, releases the other messages, stops the publishers and returns nil, within ShutdownTimeout.
func (r *Relay) Run(ctx context.Context) error {
	defer r.observe(ctx)()
	defer r.transports.watch(r.wake.ring)()
	d, wait, end := r.dispatch(ctx, 0)
	defer end()
	defer r.runPublishers(d.spans)()
	defer r.health.begin()()
	defer d.handOver()
	defer wait()
	defer r.runBackground(d.spans)()
	d.serve(ctx, r.pauseDelay)
	r.health.setLooking(false)
	d.lastCall(wait)
	return nil
}

// pauseDelay returns the length of the pause after failure number n in a row, from 1.
func (r *Relay) pauseDelay(n int) time.Duration { return r.pauses.Delay(n-1, r.cfg.Rand()) }

// Ready returns nil while Run works: the last store call succeeded, no transport is paused, and every
// publisher with a connection is connected. It makes no server call. An idle relay polls at least once in
// five times PollInterval. A Drain does not make it ready.
func (r *Relay) Ready(ctx context.Context) error {
	errs := []error{r.health.ready()}
	for _, t := range r.transports {
		errs = append(errs, t.usable(ctx))
	}
	return errors.Join(errs...)
}

var (
	errNotStarted error = runloop.NotRunning("outbox: relay has not polled its store yet")
	errNotRunning error = runloop.NotRunning("outbox: relay is not running")
)

// health is the last known state of a relay's store. Its methods are safe for concurrent use.
type health struct {
	mu      sync.Mutex
	runs    int   // Runs that work
	last    error // of the last Claim or Settle since the first of them started
	looking bool  // Run works and the store is not paused
}

// begin records that a Run has started; end records that it has ended.
func (h *health) begin() (end func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.runs++; h.runs == 1 {
		h.last = errNotStarted
	}
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.runs--
	}
}

// ready returns nil if a Run works and the last store call succeeded.
func (h *health) ready() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.runs == 0 {
		return errNotRunning
	}
	return h.last
}

// saw records the result of a store call.
func (h *health) saw(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.last = err
}

// setLooking sets whether the relay polls when it is woken.
func (h *health) setLooking(looking bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.looking = looking
}

// whileLooking calls wake if the relay polls at present, and reports whether it does.
func (h *health) whileLooking(wake func()) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.looking {
		wake()
	}
	return h.looking
}

// runPublishers keeps the publishers' connections until stop is called; stop waits until they have ended.
// They also end when the relay stops waiting for confirms.
func (r *Relay) runPublishers(life spans) (stop func()) {
	ctx, cancel := context.WithCancel(life.confirm)
	var running sync.WaitGroup
	for _, t := range r.transports {
		running.Go(func() { t.run(ctx) })
	}
	return func() {
		cancel()
		r.await(life.work, &running, "publishers")
	}
}

// runBackground runs the store's background work until the relay's context ends; wait waits until it has ended.
func (r *Relay) runBackground(life spans) (wait func()) {
	source, ok := r.source.(driver.Background)
	if !ok {
		return func() {}
	}
	var running sync.WaitGroup
	running.Go(func() { source.Background(life.life, r.look) })
	return func() { r.await(life.work, &running, "store") }
}

// await waits for running to end, at most until the end of work and for ShutdownTimeout. A server that does
// not answer therefore cannot block a shutdown.
func (r *Relay) await(work context.Context, running *sync.WaitGroup, what string) {
	ctx, cancel := context.WithTimeout(work, r.cfg.ShutdownTimeout)
	defer cancel()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		running.Wait()
	}()
	select {
	case <-ended:
	case <-ctx.Done():
		r.log(ctx, slog.LevelWarn, "outbox: shutdown timed out; abandoning background work", what, slog.String("what", what))
	}
}

// look is the wake function of the store's Background: it makes the relay poll now, or returns false if the
// relay does not poll.
func (r *Relay) look() bool {
	return !r.transports[""].breaker.leftAlone() && r.health.whileLooking(r.wake.ring)
}

// prune deletes due rows of the store, for at most the given time. The next Drain deletes the rest. This is for
// systems without a running relay.
func prune(ctx context.Context, source driver.Source, atMost time.Duration) {
	pruner, ok := source.(driver.Pruner)
	if !ok || ctx.Err() != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, atMost)
	defer cancel()
	pruner.PrunePass(ctx)
}

// Check checks the servers of the store and of every publisher. It returns nil if they meet all requirements.
// Otherwise the error joins the findings, each with a method Fix() string that returns the fix, and the
// errors of checks that failed to run.
func (r *Relay) Check(ctx context.Context) error {
	parts := []any{r.source}
	for _, t := range r.transports {
		parts = append(parts, t.publisher)
	}
	var errs []error
	for _, part := range parts {
		if part, ok := part.(driver.Checked); ok {
			errs = append(errs, single(part.Check(ctx))...)
		}
	}
	return errors.Join(errs...)
}

// single returns the errors that err joins, so that they can be joined with others.
func single(err error) []error {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		return joined.Unwrap()
	}
	return []error{err}
}

// journal logs repeated events: one line in 10 s for each kind, with the number of lines left out before it.
// Failing messages can come in large numbers; the metrics count each of them.
type journal func(ctx context.Context, level slog.Level, msg, kind string, attrs ...slog.Attr)

func newJournal(logger *slog.Logger) journal {
	var seldom telemetry.SeldomEach
	return func(ctx context.Context, level slog.Level, msg, kind string, attrs ...slog.Attr) {
		if repeats, ok := seldom.Due(msg + " " + kind); ok {
			logger.LogAttrs(ctx, level, msg, append(attrs, slog.Int("repeats", repeats))...)
		}
	}
}
