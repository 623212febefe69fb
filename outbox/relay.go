package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/telemetry"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// Relay moves messages from a Source to its Transports. Any number of relays may work on
// one store, in one process or in many. Its methods are safe for concurrent use.
type Relay struct {
	source     driver.Source
	transports Transports
	cfg        RelayConfig
	telemetry  instruments
	wake       chan struct{}
	seldom     telemetry.SeldomEach // a line of log a while for each kind of fault

	reports  sync.Mutex // one batch is reported at a time
	mu       sync.Mutex
	lastLook error // of the last Claim or Settle
	pauses   map[string]pause
	ready    map[string]time.Time // when a transport's publisher was ready again
}

var (
	errNotStarted = errors.New("outbox: the relay has not looked at its source yet")
	errEnded      = errors.New("outbox: the relay has ended")
)

// NewRelay returns a Relay; Run or Drain sets it to work. At least one transport is needed.
func NewRelay(source driver.Source, transports Transports, cfg RelayConfig) (*Relay, error) {
	cfg = cfg.withDefaults()
	errs := []error{cfg.validate()}
	if source == nil {
		errs = append(errs, errors.New("outbox: NewRelay needs a Source"))
	}
	if len(transports) == 0 {
		errs = append(errs, errors.New("outbox: NewRelay needs a Publisher in its Transports"))
	}
	for name, p := range transports {
		if p == nil {
			errs = append(errs, fmt.Errorf("outbox: NewRelay: transport %q is nil", name))
		}
	}
	instruments, err := newInstruments(cfg, transports)
	if err := errors.Join(append(errs, err)...); err != nil {
		return nil, err
	}
	return &Relay{
		source: source, transports: maps.Clone(transports), cfg: cfg, telemetry: instruments,
		wake: make(chan struct{}, 1), lastLook: errNotStarted, pauses: map[string]pause{}, ready: map[string]time.Time{},
	}, nil
}

// Run publishes until ctx is cancelled. Then it sends nothing more, waits for the confirms of what
// is in flight, gives the rest back and returns nil, within ShutdownTimeout. It outlives every
// fault of store and brokers: those are logged, counted, and tried again after a growing pause. It
// never returns an error at present.
func (r *Relay) Run(ctx context.Context) error {
	defer r.observe(ctx)()
	defer r.watchPublishers()()
	defer r.runBackground(ctx)()
	d, wait := r.dispatch(ctx, 0)
	defer r.setLastLook(errEnded)
	defer wait()
	failures := 0
	for ctx.Err() == nil {
		found, err := d.next(ctx)
		switch {
		case err != nil:
			failures++
			r.log(ctx, slog.LevelWarn, "outbox: store unavailable", "", slog.Int("failures", failures), slog.Any("error", err))
			_ = runloop.Sleep(ctx, r.cfg.pauseDelay(failures))
		case !found:
			failures = 0
			d.idle(ctx)
		default:
			failures = 0
		}
	}
	return nil
}

// Wake makes an idle relay look for messages at once. It never blocks, and many calls cost
// one look. Call it after the commit of a transaction that wrote messages.
func (r *Relay) Wake() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Ready returns nil while Run works: if the last look reached the store and no transport is paused. It
// asks nobody: a running relay looks at least once per PollInterval.
func (r *Relay) Ready(context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	errs := []error{r.lastLook}
	for name, p := range r.pauses {
		errs = append(errs, pausedError(name, p))
	}
	return errors.Join(errs...)
}

func (r *Relay) setLastLook(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lastLook = err
}
