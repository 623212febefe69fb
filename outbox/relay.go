package outbox

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/internal/backoff"
	"github.com/holdfast-go/holdfast/internal/telemetry"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// Relay moves messages from a store to the publishers of their transports. Any number of relays may
// work on one store, in one process or in many. Its methods are safe for concurrent use.
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

// unavailable is for how long a store or a transport that is unavailable is left alone. A pause
// outlives the fault that has caused it, so it is short.
var unavailable = backoff.Policy{Base: 200 * time.Millisecond, Max: 2 * time.Second, Jitter: 0.5}

// NewRelay returns a Relay between a store and the publisher of the default transport. Run or Drain
// sets it to work.
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
	for _, p := range publishers {
		if p, ok := p.(*PublisherFunc); ok {
			errs = append(errs, p.validate())
		}
	}
	instruments, err := newInstruments(cfg, publishers)
	if err := errors.Join(append(errs, err)...); err != nil {
		return nil, err
	}
	r := &Relay{
		source: store, transports: transports{}, cfg: cfg, pauses: unavailable, telemetry: instruments,
		wake: make(bell, 1), log: newJournal(cfg.Logger), health: &health{last: errNotStarted},
	}
	for name, p := range publishers {
		r.transports[name] = &transport{name: name, publisher: p, breaker: breaker{delay: r.pauseDelay}, log: r.log}
	}
	r.rounds = &rounds{source: store, transports: r.transports, cfg: cfg, telemetry: instruments, log: r.log, health: r.health}
	return r, nil
}

// Run publishes until ctx ends. It also keeps the publishers' connections, hears of commits in other
// processes and has the store pruned, as far as these need it. It outlives every fault of store and
// brokers: those are logged, counted, and tried again after a growing pause. At present it never
// returns an error.
//
// When ctx ends, it publishes what it was woken for before, waits for the confirms of what is in
// flight, gives the rest back, ends the publishers and returns nil, within ShutdownTimeout.
func (r *Relay) Run(ctx context.Context) error {
	defer r.observe(ctx)()
	defer r.transports.watch(r.wake.ring)()
	d, wait, end := r.dispatch(ctx, 0)
	defer end()
	defer r.runPublishers(d.spans)()
	defer r.health.saw(errEnded)
	defer d.handOver()
	defer wait()
	defer r.runBackground(d.spans)()
	d.serve(ctx, r.pauseDelay)
	r.health.setLooking(false)
	d.lastCall(wait)
	return nil
}

// pauseDelay is how long something unavailable is left alone after its failure number n, from 1.
func (r *Relay) pauseDelay(n int) time.Duration { return r.pauses.Delay(n-1, r.cfg.Rand()) }

// Ready returns nil while Run works: if the last look reached the store, no transport is paused and
// every publisher with a connection has it. It asks no server: a running relay with
// nothing to do looks once in five times PollInterval at least.
func (r *Relay) Ready(ctx context.Context) error {
	errs := []error{r.health.err()}
	for _, t := range r.transports {
		errs = append(errs, t.usable(ctx))
	}
	return errors.Join(errs...)
}

var (
	errNotStarted = errors.New("outbox: the relay has not looked at its store yet")
	errEnded      = errors.New("outbox: the relay has ended")
)

// health is what is known of a relay's store. Its methods may be called from any goroutine.
type health struct {
	mu      sync.Mutex
	last    error // of the last Claim or Settle
	looking bool  // Run works and the store is not paused
}

// saw notes how the store answered.
func (h *health) saw(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.last = err
}

// err is why the last look did not reach the store.
func (h *health) err() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.last
}

// setLooking says whether the relay looks for messages when it is woken.
func (h *health) setLooking(looking bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.looking = looking
}

// whileLooking calls wake if the relay looks then, and reports whether it does.
func (h *health) whileLooking(wake func()) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.looking {
		wake()
	}
	return h.looking
}

// runPublishers keeps the publishers' connections until stop is called, which waits for their end.
// They end by themselves when no confirm is waited for any more.
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

// runBackground has the store do its own work beside the relay until ctx ends. wait returns after
// the end of that work.
func (r *Relay) runBackground(life spans) (wait func()) {
	source, ok := r.source.(driver.Background)
	if !ok {
		return func() {}
	}
	var running sync.WaitGroup
	running.Go(func() { source.Background(life.life, r.look) })
	return func() { r.await(life.work, &running, "store") }
}

// await waits for what is running and was told to end, until the end of work and for ShutdownTimeout
// at most: a server that does not answer holds up no shutdown.
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
		r.log(ctx, slog.LevelWarn, "outbox: ShutdownTimeout is over, what does not end is left behind", what, slog.String("what", what))
	}
}

// look is the wake function of the store's Background: it makes the relay look for messages now, or
// reports that it does not.
func (r *Relay) look() bool {
	return !r.transports[""].breaker.leftAlone() && r.health.whileLooking(r.wake.ring)
}

// prune has the store delete what is due, for a while at most: what is left is for the next Drain,
// which ends with it, for systems without a running relay.
func prune(ctx context.Context, source driver.Source, atMost time.Duration) {
	pruner, ok := source.(driver.Pruner)
	if !ok || ctx.Err() != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, atMost)
	defer cancel()
	pruner.PrunePass(ctx)
}

// Check looks at the servers of the store and of every publisher. nil: there is nothing to mend.
// Else the error joins the findings, each with a method Mend() string, and the failures to look.
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

// journal writes what happens again and again: of each kind one line in 10 s, which says how many were
// left out before it. Messages that fail come in streams, and the hooks and metrics tell of each.
type journal func(ctx context.Context, level slog.Level, msg, kind string, attrs ...slog.Attr)

func newJournal(logger *slog.Logger) journal {
	var seldom telemetry.SeldomEach
	return func(ctx context.Context, level slog.Level, msg, kind string, attrs ...slog.Attr) {
		if repeats, ok := seldom.Due(msg + " " + kind); ok {
			logger.LogAttrs(ctx, level, msg, append(attrs, slog.Int("repeats", repeats))...)
		}
	}
}
