package outbox

import (
	"context"
	"errors"
	"maps"
	"time"

	"github.com/holdfast-go/holdfast/internal/backoff"
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
