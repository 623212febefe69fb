package outbox

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/internal/backoff"
	"github.com/holdfast-go/holdfast/internal/runloop"
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
	wake       chan struct{}
	seldom     telemetry.SeldomEach // a line of log a while for each kind of fault

	reports  sync.Mutex // one batch is reported at a time
	mu       sync.Mutex
	lastLook error // of the last Claim or Settle
	looking  bool  // Run works and the store is not paused
}

// unavailable is for how long a store or a transport that is unavailable is left alone. A pause
// outlives the fault that has caused it, so it is short.
var unavailable = backoff.Policy{Base: 200 * time.Millisecond, Max: 2 * time.Second, Jitter: 0.5}

var (
	errNotStarted = errors.New("outbox: the relay has not looked at its store yet")
	errEnded      = errors.New("outbox: the relay has ended")
)

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
	instruments, err := newInstruments(cfg, slices.Collect(maps.Keys(publishers)))
	if err := errors.Join(append(errs, err)...); err != nil {
		return nil, err
	}
	r := &Relay{
		source: store, transports: transports{}, cfg: cfg, pauses: unavailable, telemetry: instruments,
		wake: make(chan struct{}, 1), lastLook: errNotStarted,
	}
	for name, p := range publishers {
		r.transports[name] = &transport{name: name, publisher: p, delay: r.pauseDelay}
	}
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
	defer r.watchPublishers()()
	d, wait, end := r.dispatch(ctx, 0)
	defer end()
	defer r.runPublishers(d.spans)()
	defer r.setLastLook(errEnded)
	defer wait()
	defer r.runBackground(d.spans)()
	r.serve(ctx, d)
	r.setLooking(false)
	r.lastCall(d, wait)
	return nil
}

// serve claims and publishes until ctx ends.
func (r *Relay) serve(ctx context.Context, d *dispatcher) {
	failures := 0
	for ctx.Err() == nil {
		r.setLooking(true)
		found, err := d.next(ctx)
		switch {
		case err != nil:
			r.setLooking(false)
			failures++
			r.log(ctx, slog.LevelWarn, "outbox: store unavailable", "", slog.Int("failures", failures), slog.Any("error", err))
			_ = runloop.Sleep(ctx, r.pauseDelay(failures))
		case !found:
			failures = 0
			d.idle(ctx)
		default:
			failures = 0
		}
	}
}

// lastCall honours a wake-up that came before the end of Run: whoever woke this relay has told no
// other. What it claims has half of the time that is left for confirms.
func (r *Relay) lastCall(d *dispatcher, wait func()) {
	select {
	case <-r.wake:
	default:
		if !d.woken {
			return
		}
	}
	ctx, cancel := context.WithTimeout(d.spans.confirm, (r.cfg.ShutdownTimeout-r.cfg.storeTimeout())/2)
	defer cancel()
	defer wait()
	if _, err := d.next(ctx); err != nil {
		r.log(ctx, slog.LevelWarn, "outbox: store unavailable", "", slog.Any("error", err))
	}
}

// pauseDelay is how long something unavailable is left alone after its failure number n, from 1.
func (r *Relay) pauseDelay(n int) time.Duration { return r.pauses.Delay(n-1, r.cfg.Rand()) }

// signal makes an idle relay look for messages at once. It never blocks, and many calls cost one look.
func (r *Relay) signal() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Ready returns nil while Run works: if the last look reached the store, no transport is paused and
// every publisher with a connection has it. It asks no server: a running relay looks at least once
// per PollInterval.
func (r *Relay) Ready(ctx context.Context) error {
	r.mu.Lock()
	errs := []error{r.lastLook}
	r.mu.Unlock()
	errs = append(errs, r.transports.paused())
	for _, t := range r.transports {
		if service, ok := t.publisher.(driver.Service); ok {
			errs = append(errs, service.Ready(ctx))
		}
	}
	return errors.Join(errs...)
}

func (r *Relay) setLastLook(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lastLook = err
}
