package engine

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/telemetry"
)

const (
	// depthAge is how old the counts of dead letters may get while somebody reads them.
	depthAge = time.Minute

	// depthPoll is how often it is asked whether somebody does.
	depthPoll = 5 * time.Second

	// depthTimeout bounds one count.
	depthTimeout = 10 * time.Second
)

// depths are how many dead letters there are. They are counted while the gauge is read, and never
// by the one who reads it: a broker may be slow.
type depths struct {
	cfg     *settings
	letters driver.DeadLetters // nil: the source tells of none
	meter   metric.Meter
	gauge   metric.Int64ObservableGauge
	read    atomic.Bool // since the last count
	counts  atomic.Pointer[[]driver.Depth]
	seldom  telemetry.Seldom
}

func newDepths(cfg *settings, source driver.Source, meter metric.Meter) (*depths, error) {
	d := &depths{cfg: cfg, meter: meter}
	if keeper, ok := source.(driver.Keeper); ok {
		d.letters = cfg.deadLetters(keeper.DeadLetters())
	}
	var err error
	d.gauge, err = meter.Int64ObservableGauge(cfg.metric("dead_letters"),
		metric.WithDescription("Dead letters of the consumer's queues, by class; counted about once a minute"))
	return d, err
}

// observe reports the latest counts.
func (d *depths) observe(_ context.Context, o metric.Observer) error {
	d.read.Store(true)
	counts := d.counts.Load()
	if counts == nil {
		return nil
	}
	for _, depth := range *counts {
		o.ObserveInt64(d.gauge, int64(depth.Messages),
			metric.WithAttributes(attribute.String("queue", d.cfg.Queue), attribute.String("class", depth.Class)))
	}
	return nil
}

// run counts, and reports the gauge, until ctx ends.
func (d *depths) run(ctx context.Context) {
	if d.letters == nil {
		return
	}
	defer d.counts.Store(nil)
	if registration, err := d.meter.RegisterCallback(d.observe, d.gauge); err == nil {
		defer func() { _ = registration.Unregister() }()
	}
	for pause := depthPoll; runloop.Sleep(ctx, pause) == nil; {
		pause = depthPoll
		if d.read.Swap(false) {
			d.count(ctx)
			pause = depthAge
		}
	}
}

// byClass counts them now, by class, and says whether a session may have more. It is nil where the source tells of none.
func (d *depths) byClass(ctx context.Context) (dead map[string]int, held bool, err error) {
	if d.letters == nil {
		return nil, false, nil
	}
	counts, err := d.letters.Depths(ctx)
	if err != nil {
		return nil, false, err
	}
	dead = map[string]int{}
	for _, depth := range counts {
		dead[depth.Class] += depth.Messages
		held = held || depth.Held
	}
	return dead, held, nil
}

func (d *depths) count(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, depthTimeout)
	defer cancel()
	counts, err := d.letters.Depths(ctx)
	if err == nil {
		d.counts.Store(&counts)
		return
	}
	d.counts.Store(nil) // no number is better than an old one
	if repeats, ok := d.seldom.Due(); ok {
		d.cfg.Logger.WarnContext(ctx, "dead letters not counted", slog.Any("error", err), slog.Int("repeats", repeats))
	}
}
