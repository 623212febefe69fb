package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/telemetry"
	"github.com/holdfast-go/holdfast/ratelimit/internal/bounds"
	"github.com/holdfast-go/holdfast/ratelimit/internal/table"
)

const (
	defaultShare = 100
	// maxLeases bounds the limits and keys of which units are held; others are asked of the store.
	maxLeases = 10_000
	// giveBackTimeout bounds giving back, and with it the end of Run.
	giveBackTimeout = 5 * time.Second
)

// LeasedConfig configures a Leased limiter. The zero value works.
type LeasedConfig struct {
	// Share bounds what is taken ahead: at most this part of the units that a limit has left, so that a
	// process which dies strands no more. A limit whose Max is below Share is asked of the store each
	// time, and so are the last Share units of any limit. At least 1. Default: 100, for one in a hundred.
	Share int64
	// MeterProvider is for the gauge holdfast.ratelimit.leased. Default: the global one.
	MeterProvider metric.MeterProvider
}

// Leased is a Limiter that takes units of busy limits ahead from a store that many processes share, and
// spends them in memory. See the package's documentation for what is promised. It implements
// driver.Reserver too. Make it with NewLeased, and run it. It is safe for concurrent use.
type Leased struct {
	store  Limiter
	cfg    LeasedConfig
	meter  metric.Meter
	gauge  metric.Int64ObservableGauge
	leases *table.Table[lease]
	rules  rules
	open   atomic.Bool // Run runs
}

// NewLeased returns a Leased limiter on a store, which is a ratelimitredis.Limiter for all but tests.
func NewLeased(store Limiter, cfg LeasedConfig) (*Leased, error) {
	var errs []error
	if store == nil {
		errs = append(errs, errNilLimiter)
	}
	if cfg.Share < 0 {
		errs = append(errs, fmt.Errorf("ratelimit: LeasedConfig.Share is %d, must not be negative", cfg.Share))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if cfg.Share == 0 {
		cfg.Share = defaultShare
	}
	meter := telemetry.New("github.com/holdfast-go/holdfast/ratelimit", nil, cfg.MeterProvider).Meter
	gauge, err := meter.Int64ObservableGauge("holdfast.ratelimit.leased",
		metric.WithDescription("Units by limit that were taken ahead and not spent: a process that dies strands them until they lapse."), metric.WithUnit("{unit}"))
	if err != nil {
		return nil, fmt.Errorf("ratelimit: %w", err)
	}
	return &Leased{store: store, cfg: cfg, meter: meter, gauge: gauge, leases: table.New[lease](math.MaxInt)}, nil
}

// Run gives back what was not spent in time, and all that is left when ctx ends, within 10 s: what the
// store has not taken back by then stays charged until it lapses. While it does not run every call asks
// the store and nothing is taken ahead. It returns nil, or an error if it runs already or if the meter
// refuses the gauge.
func (l *Leased) Run(ctx context.Context) error {
	if !l.open.CompareAndSwap(false, true) {
		return errors.New("ratelimit: Run of a Leased limiter is running already")
	}
	registered, err := l.meter.RegisterCallback(l.observe, l.gauge)
	if err != nil {
		l.open.Store(false)
		return fmt.Errorf("ratelimit: %w", err)
	}
	for runloop.Sleep(ctx, leaseHold) == nil {
		l.sweep(ctx)
	}
	l.open.Store(false)
	l.sweep(ctx)
	if err := registered.Unregister(); err != nil {
		return fmt.Errorf("ratelimit: %w", err)
	}
	return nil
}

// Ready returns nil while Run runs.
func (l *Leased) Ready(context.Context) error {
	if !l.open.Load() {
		return errors.New("ratelimit: Run of a Leased limiter is not running")
	}
	return nil
}

// Refund implements Limiter: it asks the store.
func (l *Leased) Refund(ctx context.Context, charges ...Charge) error {
	return l.store.Refund(ctx, charges...)
}

// Reserve implements driver.Reserver: it asks the store, since token buckets are not leased.
func (l *Leased) Reserve(ctx context.Context, within time.Duration, charges ...Charge) (Decision, error) {
	r, ok := l.store.(reserver)
	if !ok {
		return Decision{}, fmt.Errorf("%w: the limiter cannot reserve", ErrInvalid)
	}
	return r.Reserve(ctx, within, charges...)
}

// Allow implements Limiter. It asks the store unless all the charges are covered by units that are held.
func (l *Leased) Allow(ctx context.Context, charges ...Charge) (d Decision, err error) {
	if err := ctx.Err(); err != nil {
		return Decision{}, err
	}
	if !l.open.Load() || len(charges) == 0 || len(charges) > bounds.Charges {
		return l.store.Allow(ctx, slices.Clone(charges)...)
	}
	var space [fewParts]need
	needs := space[:]
	if len(charges) > fewParts {
		needs = make([]need, len(charges))
	}
	needs = needs[:len(charges)]
	switch l.spend(&d, charges, needs) {
	case spent:
		return d, nil
	case toAsk:
		return l.ask(ctx, slices.Clone(charges), slices.Clone(needs))
	}
	return l.store.Allow(ctx, slices.Clone(charges)...)
}

// observe collects the gauge.
func (l *Leased) observe(_ context.Context, o metric.Observer) error {
	held := map[string]int64{}
	l.leases.Each(func(_ string, e *lease) bool {
		held[e.rule.Name] += e.units
		return true
	})
	for name, units := range held {
		o.ObserveInt64(l.gauge, units, metric.WithAttributes(attribute.String("limit", name)))
	}
	return nil
}

// sweep gives back what was held for too long, or all units if Run ends, and forgets idle leases.
func (l *Leased) sweep(ctx context.Context) {
	var back []Charge
	open, now := l.open.Load(), time.Now()
	l.leases.Each(func(key string, e *lease) bool {
		idle := now.Sub(e.asked)
		if e.units > 0 && (now.Sub(e.taken) >= leaseHold || !open) {
			back = append(back, Charge{Limit: e.rule.given, Key: key, Cost: e.units, At: time.UnixMilli(e.since)})
			e.units = 0
		}
		return e.calls > 0 || e.units > 0 || idle < 2*leaseHold && open
	})
	l.giveBack(ctx, back)
}

// giveBack refunds units that were not spent. What the store cannot take stays charged until it lapses:
// a second try could give back what was given back already.
func (l *Leased) giveBack(ctx context.Context, back []Charge) {
	if len(back) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), giveBackTimeout)
	defer cancel()
	for len(back) > 0 {
		n := 1
		for n < min(len(back), bounds.Charges) && !charged(back[:n], back[n]) {
			n++
		}
		_ = l.store.Refund(ctx, back[:n]...)
		back = back[n:]
	}
}

// charged reports whether the limit and key of c are among the charges.
func charged(charges []Charge, c Charge) bool {
	return slices.ContainsFunc(charges, func(o Charge) bool { return o.Limit.Name == c.Limit.Name && o.Key == c.Key })
}
