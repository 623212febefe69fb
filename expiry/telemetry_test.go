package expiry_test

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/metric"
	metrics "go.opentelemetry.io/otel/metric/noop"

	"github.com/holdfast-go/holdfast/expiry"
)

// figures are what the instruments got: sums of counters, last values of the
// others.
type figures struct {
	mu     sync.Mutex
	values map[string]float64
}

func (f *figures) set(name string, v float64, sum bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	name = strings.TrimPrefix(name, "holdfast.expiry.")
	if sum {
		v += f.values[name]
	}
	f.values[name] = v
}

func (f *figures) get(name string) float64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.values[name]
}

type meters struct {
	metrics.MeterProvider
	f *figures
}

func (m meters) Meter(string, ...metric.MeterOption) metric.Meter { return meter{f: m.f} }

type meter struct {
	metrics.Meter
	f *figures
}

func (m meter) Int64Counter(name string, _ ...metric.Int64CounterOption) (metric.Int64Counter, error) {
	return counter{f: m.f, name: name}, nil
}

func (m meter) Float64Histogram(name string, _ ...metric.Float64HistogramOption) (metric.Float64Histogram, error) {
	return histogram{f: m.f, name: name}, nil
}

func (m meter) Int64Gauge(name string, _ ...metric.Int64GaugeOption) (metric.Int64Gauge, error) {
	return wholeGauge{f: m.f, name: name}, nil
}

func (m meter) Float64Gauge(name string, _ ...metric.Float64GaugeOption) (metric.Float64Gauge, error) {
	return gauge{f: m.f, name: name}, nil
}

type counter struct {
	metrics.Int64Counter
	f    *figures
	name string
}

func (c counter) Add(_ context.Context, n int64, _ ...metric.AddOption) {
	c.f.set(c.name, float64(n), true)
}

type histogram struct {
	metrics.Float64Histogram
	f    *figures
	name string
}

func (h histogram) Record(_ context.Context, v float64, _ ...metric.RecordOption) {
	h.f.set(h.name, v, false)
}

type wholeGauge struct {
	metrics.Int64Gauge
	f    *figures
	name string
}

func (g wholeGauge) Record(_ context.Context, v int64, _ ...metric.RecordOption) {
	g.f.set(g.name, float64(v), false)
}

type gauge struct {
	metrics.Float64Gauge
	f    *figures
	name string
}

func (g gauge) Record(_ context.Context, v float64, _ ...metric.RecordOption) {
	g.f.set(g.name, v, false)
}

func TestFigures(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := &figures{values: map[string]float64{}}
		w := newWorld(t)
		w.ahead = -5 * time.Minute
		for _, id := range []string{"a", "b", "bad"} {
			w.hold(t, id, -20*time.Second)
		}
		w.hold(t, "later", time.Hour)
		store := w.emitting(t, func(_ context.Context, rows []expiry.Row) error {
			if has(rows, "bad") {
				return errors.New("bad row")
			}
			return nil
		})
		stop := run(t, newSweeper(t, store, expiry.SweeperConfig{MeterProvider: meters{f: f}}))
		defer stop()
		time.Sleep(10 * time.Second)
		want := map[string]float64{
			"claimed": 2, "expired": 2, "raced": 0, "poisoned": 1, "sweep.duration": 0, "lag": 20,
			"overdue": 1, "overdue.age": 20.1, "clock.skew": 300, "next": float64(time.Now().Add(80*time.Second).UnixMilli())/1000 + 0.1,
		}
		for _, name := range slices.Sorted(maps.Keys(want)) {
			if got := f.get(name); got-want[name] > 0.001 || want[name]-got > 0.001 {
				t.Errorf("%s is %.3f, want %.3f", name, got, want[name])
			}
		}
	})
}

// undated is a store in which some active rows have no deadline.
type undated struct {
	*world
	rows *atomic.Int64
}

func (u undated) Look(ctx context.Context, skip []string) (expiry.Outlook, error) {
	o, err := u.world.Look(ctx, skip)
	o.Undated = int(u.rows.Load())
	return o, err
}

// logged counts the lines of a log that say something.
type logged struct {
	slog.Handler
	part string
	n    *atomic.Int64
}

func (l logged) Enabled(context.Context, slog.Level) bool { return true }

func (l logged) Handle(_ context.Context, r slog.Record) error {
	if strings.Contains(r.Message, l.part) {
		l.n.Add(1)
	}
	return nil
}

// Rows that lose their deadline are counted at every look, and logged once until
// there are none.
func TestRowsWithoutDeadlineAreReported(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := &figures{values: map[string]float64{}}
		log := logged{slog.DiscardHandler, "no deadline", new(atomic.Int64)}
		u := undated{newWorld(t), new(atomic.Int64)}
		sw, err := expiry.NewSweeper(u, expiry.SweeperConfig{MeterProvider: meters{f: f}, Logger: slog.New(log)})
		if err != nil {
			t.Fatal(err)
		}
		stop := run(t, sw)
		defer stop()
		for i, rows := range []int64{0, 3, 0, 2} {
			u.rows.Store(rows)
			time.Sleep(time.Hour)
			if got := f.get("undated"); got != float64(rows) {
				t.Errorf("undated is %v, want %d", got, rows)
			}
			if got, want := log.n.Load(), int64(i+1)/2; got != want {
				t.Errorf("logged %d times, want %d", got, want)
			}
		}
	})
}
