package outbox

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

const (
	// gaugeInterval is for how long the store's last answer is reported again.
	gaugeInterval = 5 * time.Second
	// gaugeTimeout bounds the question to the store, and with it the collection of all metrics.
	gaugeTimeout = 2 * time.Second
)

// gaugeSet are the observable instruments.
type gaugeSet struct {
	depth  metric.Int64ObservableGauge
	oldest metric.Float64ObservableGauge
	state  metric.Int64ObservableGauge
	window metric.Float64ObservableGauge
}

func newGaugeSet(meter metric.Meter) (gaugeSet, error) {
	depth, err1 := meter.Int64ObservableGauge("holdfast.outbox.depth",
		metric.WithDescription("Messages in the store by state: ready, parked or dead. Counted up to 100,000."), metric.WithUnit("{message}"))
	oldest, err2 := meter.Float64ObservableGauge("holdfast.outbox.oldest.age",
		metric.WithDescription("Age of the oldest message that is ready or waits after a failure."), metric.WithUnit("s"))
	state, err3 := meter.Int64ObservableGauge("holdfast.outbox.transport.state",
		metric.WithDescription("1 for the state that the transport is in: closed, paused or probing; 0 for the others."))
	window, err4 := meter.Float64ObservableGauge("holdfast.outbox.window.fill",
		metric.WithDescription("Messages that await their confirm, as a part of how many may."), metric.WithUnit("1"))
	return gaugeSet{depth, oldest, state, window}, errors.Join(err1, err2, err3, err4)
}

// gauges observe one Run of a relay.
type gauges struct {
	relay *Relay

	mu    sync.Mutex
	store *driver.Depth
	asked time.Time
}

// observe has the gauges of the relay collected until stop is called.
func (r *Relay) observe(ctx context.Context) (stop func()) {
	run, cancel := context.WithCancel(context.WithoutCancel(ctx)) // it lasts until all confirms are in
	g, set := &gauges{relay: r}, r.telemetry.gauges
	registered, err := r.telemetry.kit.Meter.RegisterCallback(func(ctx context.Context, o metric.Observer) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(run, cancel)()
		return g.collect(ctx, o)
	}, set.depth, set.oldest, set.state, set.window)
	if err != nil {
		cancel()
		r.cfg.Logger.WarnContext(ctx, "outbox: the relay has no gauges", slog.Any("error", err))
		return func() {}
	}
	return func() {
		cancel() // ends a collection that would hold up the next line
		if err := registered.Unregister(); err != nil {
			r.cfg.Logger.WarnContext(ctx, "outbox: the relay's gauges stay", slog.Any("error", err))
		}
	}
}

func (g *gauges) collect(ctx context.Context, o metric.Observer) error {
	set := g.relay.telemetry.gauges
	for name, t := range g.relay.transports.stats() {
		transport := attribute.String("transport", name)
		for _, state := range []string{stateClosed, statePaused, stateProbing} {
			var is int64
			if t.State == state {
				is = 1
			}
			o.ObserveInt64(set.state, is, metric.WithAttributes(transport, attribute.String("state", state)))
		}
		if _, ok := g.relay.transports[name].publisher.(driver.Windowed); ok {
			o.ObserveFloat64(set.window, t.Window, metric.WithAttributes(transport))
		}
	}
	store, err := g.stored(ctx)
	if store == nil {
		return err
	}
	for state, n := range map[string]int{"ready": store.Ready, "parked": store.Parked, "dead": store.Dead} {
		o.ObserveInt64(set.depth, int64(n), metric.WithAttributes(attribute.String("state", state)))
	}
	o.ObserveFloat64(set.oldest, store.OldestAge.Seconds())
	return nil
}

// stored is what the store told last, nil if it does not tell.
func (g *gauges) stored(ctx context.Context) (*driver.Depth, error) {
	source, ok := g.relay.source.(driver.Measured)
	if !ok {
		return nil, nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.asked.IsZero() && time.Since(g.asked) < gaugeInterval {
		return g.store, nil
	}
	ctx, cancel := context.WithTimeout(ctx, gaugeTimeout)
	defer cancel()
	g.store = nil
	stats, err := source.Depth(ctx)
	g.asked = time.Now()
	if err != nil {
		return nil, err
	}
	g.store = &stats
	return g.store, nil
}
