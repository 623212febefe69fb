package expiry_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
)

// More bad rows than the quarantine holds, at the head and all of one deadline,
// do not keep the sweeper from the rows behind them.
func TestPoisonedHeadDoesNotStarveTheTail(t *testing.T) {
	t.Parallel()
	for name, step := range map[string]time.Duration{"one deadline": 0, "many deadlines": time.Second} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t)
			store := w.emitting(t, func(_ context.Context, rows []expiry.Row) error {
				if slices.ContainsFunc(rows, func(r expiry.Row) bool { return strings.HasPrefix(r.ID, "bad") }) {
					return errors.New("bad row")
				}
				return nil
			})
			for n := range 100 {
				w.hold(t, fmt.Sprintf("bad %03d", n), -time.Hour+time.Duration(n)*step)
				w.hold(t, fmt.Sprintf("tail %03d", n), -time.Hour+time.Duration(100+n)*step)
			}
			defer run(t, newSweeper(t, store, expiry.SweeperConfig{BatchSize: 8}).Tune(expiry.Tuning{MaxQuarantine: 15}))()
			time.Sleep(5 * time.Minute)
			for _, row := range w.table.Active() {
				if !strings.HasPrefix(row.ID, "bad") {
					t.Fatalf("%s: %q and others still wait behind the bad rows", name, row.ID)
				}
			}
			if left := len(w.table.Active()); left != 100 {
				t.Errorf("%s: %d rows are left, want the bad ones", name, left)
			}
		})
	}
}

// Who knows the row at fault names it, and no search is needed.
func TestNamedRowIsNotSearchedFor(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		calls := 0
		store := w.emitting(t, func(_ context.Context, rows []expiry.Row) error {
			calls++
			for _, row := range rows {
				if row.ID == "17" || row.ID == "150" {
					return fmt.Errorf("wrapped: %w", &expiry.RowError{ID: row.ID, Err: errors.New("bad row")})
				}
			}
			return nil
		})
		for n := range 200 {
			w.hold(t, fmt.Sprint(n), -time.Minute)
		}
		report, err := newSweeper(t, store, expiry.SweeperConfig{}).Sweep(t.Context())
		if err != nil || report.Expired != 198 || report.Poisoned != 2 || calls != 3 {
			t.Errorf("got %+v, %v after %d calls, want 198 expired, 2 set aside, 3 calls", report, err, calls)
		}
	})
}

// doubtful is a store in which a row whose id begins with "bad" fails by something
// that is rarely a row's fault, and any row does while all fail.
type doubtful struct {
	*world
	inner driver.Store
	all   *atomic.Bool
	tries *atomic.Int64
}

func newDoubtful(t *testing.T, w *world) doubtful {
	t.Helper()
	d := doubtful{world: w, all: new(atomic.Bool), tries: new(atomic.Int64)}
	d.inner = w.emitting(t, func(_ context.Context, rows []expiry.Row) error {
		if d.all.Load() || slices.ContainsFunc(rows, func(r expiry.Row) bool { return strings.HasPrefix(r.ID, "bad") }) {
			d.tries.Add(1)
			return errors.New("no such table")
		}
		return nil
	})
	return d
}

func (d doubtful) SweepBatch(ctx context.Context, req driver.Request) (driver.Batch, error) {
	b, err := d.inner.SweepBatch(ctx, req)
	if failed, ok := errors.AsType[*driver.BatchError](err); ok {
		failed.Doubtful = true
	}
	return b, err
}

// A row for which a batch fails as it would in an outage stops no other, whatever
// the size of batches, costs little for as long as it stays so, and expires soon
// after it no longer does.
func TestRowThatFailsLikeAnOutage(t *testing.T) {
	t.Parallel()
	for _, size := range []int{1, 2, 200} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t)
			d := newDoubtful(t, w)
			w.hold(t, "bad", -time.Hour)
			for n := range 20 {
				w.hold(t, fmt.Sprint(n), -time.Minute)
			}
			defer run(t, newSweeper(t, d, expiry.SweeperConfig{BatchSize: size, Rand: func() float64 { return 0.5 }}))()
			time.Sleep(10 * time.Second)
			if left := len(w.table.Active()); left != 1 {
				t.Errorf("batches of %d: %d rows are left, want the bad one", size, left)
			}
			time.Sleep(time.Minute)
			before := d.tries.Load()
			worst := time.Duration(0)
			for n := range 60 {
				id := fmt.Sprint("later ", n)
				deadline := w.hold(t, id, 40*time.Second)
				time.Sleep(time.Minute)
				w.mu.Lock()
				if when, ok := w.when[id]; ok {
					worst = max(worst, when.Sub(deadline))
				} else {
					t.Errorf("batches of %d: row %q has not expired", size, id)
				}
				w.mu.Unlock()
			}
			if worst > 2*time.Second {
				t.Errorf("batches of %d: a row expired %v late", size, worst)
			}
			if tries := d.tries.Load() - before; tries > 800 {
				t.Errorf("batches of %d: the bad row was tried %d times in an hour", size, tries)
			}
		})
	}
}

// Rows that fail like an outage do not keep the others of their batches from
// expiring, be there one in every batch, or so many that there is no room to set
// them all aside, where it takes hours, and longest for the last few.
func TestManyRowsThatFailLikeAnOutage(t *testing.T) {
	t.Parallel()
	for every, goal := range map[int]struct {
		within time.Duration
		others int
	}{20: {5 * time.Minute, 0}, 8: {24 * time.Hour, 20}} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t)
			d := newDoubtful(t, w)
			bad := 0
			for n := range 200 {
				id := fmt.Sprint(n)
				if n%every == 1 {
					id = "bad " + id
					bad++
				}
				w.hold(t, id, -time.Hour+time.Duration(n)*time.Second)
			}
			defer run(t, newSweeper(t, d, expiry.SweeperConfig{BatchSize: 10}).Tune(expiry.Tuning{MaxQuarantine: 20}))()
			for end := time.Now().Add(goal.within); len(w.table.Active()) > bad+goal.others && time.Now().Before(end); {
				time.Sleep(time.Minute)
			}
			if left := len(w.table.Active()); left < bad || left > bad+goal.others {
				t.Errorf("one row in %d: %d are left, want the %d bad ones", every, left, bad)
			}
		})
	}
}

// In an outage that hits every row, few batches are tried, no row is accused, and
// all expire once it is over.
func TestOutageOfEveryRow(t *testing.T) {
	t.Parallel()
	for _, size := range []int{1, 20} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t)
			d := newDoubtful(t, w)
			d.all.Store(true)
			for n := range 300 {
				w.hold(t, fmt.Sprint(n), -time.Minute)
			}
			log := newAccused()
			sw := newSweeper(t, d, expiry.SweeperConfig{BatchSize: size, Logger: slog.New(log)})
			stop := run(t, sw.Tune(expiry.Tuning{MaxQuarantine: 50}))
			time.Sleep(time.Hour)
			if tries := d.tries.Load(); tries > 3000 {
				t.Errorf("batches of %d: an hour of outage cost %d batches", size, tries)
			}
			d.all.Store(false)
			time.Sleep(time.Minute)
			stop()
			if left := len(w.table.Active()); left > 0 || len(log.rows) > 0 {
				t.Errorf("batches of %d: %d rows are left and %d were accused", size, left, len(log.rows))
			}
		})
	}
}
