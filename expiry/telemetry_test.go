package expiry_test

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/internal/metrictest"
)

// figure returns the sum of a counter, or the last value of another instrument.
func figure(t *testing.T, r *metrictest.Recorder, name string) float64 {
	t.Helper()
	values := r.Values("holdfast.expiry." + name + "{holdfast.sweeper=expiry}")
	if len(values) == 0 {
		t.Fatalf("%s was not recorded", name)
	}
	return values[len(values)-1]
}

func TestFigures(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var r metrictest.Recorder
		w := newWorld(t)
		w.ahead = -5 * time.Minute
		for _, id := range []string{"a", "b", "bad"} {
			w.hold(t, id, -20*time.Second)
		}
		w.hold(t, "later", time.Hour)
		w.store = w.emitting(t, func(_ context.Context, rows []expiry.Row) error {
			if has(rows, "bad") {
				return errors.New("bad row")
			}
			return nil
		})
		defer run(t, newSweeper(t, w, expiry.SweeperConfig{MeterProvider: &r}))()
		time.Sleep(10 * time.Second)
		want := map[string]float64{
			"claimed": 2, "expired": 2, "raced": 0, "poisoned": 1, "sweep.duration": 0, "lag": 20,
			"overdue": 1, "overdue.age": 20.1, "clock.skew": 300, "next": float64(time.Now().Add(80*time.Second).UnixMilli())/1000 + 0.1,
		}
		for _, name := range slices.Sorted(maps.Keys(want)) {
			if got := figure(t, &r, name); got-want[name] > 0.001 || want[name]-got > 0.001 {
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

func (u undated) Look(ctx context.Context, skip []string) (driver.Outlook, error) {
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
		var r metrictest.Recorder
		log := logged{slog.DiscardHandler, "no deadline", new(atomic.Int64)}
		u := undated{newWorld(t), new(atomic.Int64)}
		sw, err := expiry.NewSweeper(u, expiry.SweeperConfig{MeterProvider: &r, Logger: slog.New(log)})
		must(t, err)
		defer run(t, sw)()
		for i, rows := range []int64{0, 3, 0, 2} {
			u.rows.Store(rows)
			time.Sleep(time.Hour)
			if got := figure(t, &r, "undated"); got != float64(rows) {
				t.Errorf("undated is %v, want %d", got, rows)
			}
			if got, want := log.n.Load(), int64(i+1)/2; got != want {
				t.Errorf("logged %d times, want %d", got, want)
			}
		}
	})
}
