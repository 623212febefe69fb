package expiry_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

// Many bad rows at the head, more than the quarantine holds and all with one deadline, do not keep the sweeper from
// the rows behind them.
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
			time.Sleep(3 * time.Minute)
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

// The same holds if each bad row is named or alone in its batch, so that nothing is set aside.
func TestPoisonedHead_named(t *testing.T) {
	t.Parallel()
	for _, size := range []int{1, 8} {
		for _, bad := range []int{16, 20, 50} {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				store := w.emitting(t, func(_ context.Context, rows []expiry.Row) error {
					for _, row := range rows {
						if strings.HasPrefix(row.ID, "bad") {
							return &expiry.RowError{ID: row.ID, Err: errors.New("bad row")}
						}
					}
					return nil
				})
				for n := range bad {
					w.hold(t, fmt.Sprintf("bad %03d", n), -time.Hour+time.Duration(n)*time.Second)
					w.hold(t, fmt.Sprintf("tail %03d", n), -time.Minute+time.Duration(n)*time.Millisecond)
				}
				defer run(t, newSweeper(t, store, expiry.SweeperConfig{BatchSize: size}).Tune(expiry.Tuning{MaxQuarantine: 15}))()
				time.Sleep(3 * time.Minute)
				if left := w.table.Active(); len(left) != bad {
					t.Errorf("batches of %d: %d rows are left, want the %d bad ones: %v", size, len(left), bad, left)
				}
			})
		}
	}
}

// If the callback names the row at fault, no search is needed.
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

// doubtful is a store in which a row with an id that begins with "bad" fails by something that is rarely a row's
// fault. While all fail, any row does.
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

// A row that fails like an outage stops no other row, whatever the batch size. It costs little as long as it fails,
// and expires soon after it stops failing.
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

// Rows that fail like an outage do not keep the others in their batches from expiring, whether there is one in every
// batch, or more than can be set aside. With that many it takes hours, longest for the last few.
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

// In an outage that affects every row, few batches are tried, no row is quarantined, and all expire when it is over.
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
				t.Errorf("batches of %d: %d rows are left and %d were quarantined", size, left, len(log.rows))
			}
		})
	}
}

// One row on which Emit hangs until BatchTimeout delays the others in its batch for minutes at most, and no other
// rows.
func TestHangingRowStopsTheOthersOnlyBriefly(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		var hangs atomic.Int64
		store := w.emitting(t, func(ctx context.Context, rows []expiry.Row) error {
			if !has(rows, "bad") {
				return nil
			}
			hangs.Add(1)
			<-ctx.Done()
			return ctx.Err()
		})
		w.hold(t, "bad", -time.Hour)
		start := time.Now()
		for n := range 1000 {
			w.hold(t, fmt.Sprint("old ", n), -time.Minute)
		}
		log := newAccused()
		stop := run(t, newSweeper(t, store, expiry.SweeperConfig{Logger: slog.New(log)}))
		defer stop()

		time.Sleep(5*time.Second + 100*time.Millisecond)
		if left := len(w.table.Active()); left != 200 {
			t.Errorf("%d rows are left after the first timeout, want the batch of 200", left)
		}
		worst := time.Duration(0)
		for n := range 60 { // rows that fall due during the search
			id := fmt.Sprint("new ", n)
			deadline := w.hold(t, id, time.Second)
			store.Wake(deadline)
			time.Sleep(5 * time.Second)
			w.mu.Lock()
			if when, ok := w.when[id]; ok {
				worst = max(worst, when.Sub(deadline))
			}
			w.mu.Unlock()
		}
		if worst > 7*time.Second {
			t.Errorf("a row that fell due during the search expired %v late", worst)
		}
		if id, left := <-log.rows, len(w.table.Active()); left != 1 || id != "bad" {
			t.Errorf("%d rows are left and %q is in quarantine, want the bad one", left, id)
		}
		found := hangs.Load()
		if found > 9 {
			t.Errorf("it took %d timeouts to find 1 row in 200", found)
		}
		time.Sleep(time.Until(start.Add(30 * time.Minute)))
		if more := hangs.Load() - found; more > 5 {
			t.Errorf("the row in quarantine cost %d timeouts in half an hour, want one per 5 minutes", more)
		}
	})
}

// A row in quarantine that hangs when it is tried again, alone, does not shrink the batches of the others.
func TestHangingRowTriedAgainDoesNotShrinkBatches(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		store := w.emitting(t, func(ctx context.Context, rows []expiry.Row) error {
			if !has(rows, "bad") {
				return nil
			}
			<-ctx.Done()
			return ctx.Err()
		})
		w.hold(t, "bad", -time.Hour)
		sw := newSweeper(t, store, expiry.SweeperConfig{Quarantine: time.Minute})
		for range 2 { // once alone as well
			if _, err := sw.Sweep(t.Context()); err == nil {
				t.Fatal("the bad row has not run into BatchTimeout")
			}
		}
		for range 10 { // successful sweeps: the batches grow again
			if _, err := sw.Sweep(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(time.Minute)
		if _, err := sw.Sweep(t.Context()); err == nil {
			t.Fatal("the bad row was not tried again")
		}
		for n := range 200 {
			w.hold(t, fmt.Sprint(n), -time.Minute)
		}
		if r, err := sw.Sweep(t.Context()); err != nil || r.Batches > 2 || r.Expired != 200 {
			t.Errorf("got %+v, %v, want the others in one batch and a short one", r, err)
		}
	})
}

// A stall of the server during an expiry is not the row's fault.
func TestStallQuarantinesNoRow(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		over := time.Now().Add(35 * time.Second)
		store := w.emitting(t, func(ctx context.Context, _ []expiry.Row) error {
			return runloop.Sleep(ctx, time.Until(over))
		})
		deadline := w.hold(t, "row", time.Second)
		stop := run(t, newSweeper(t, store, expiry.SweeperConfig{}))
		defer stop()
		time.Sleep(20 * time.Minute)
		w.expiredWithin(t, "row", deadline, time.Minute)
	})
}

// Batches that an outage has made small grow again within the sweep of the remaining rows.
func TestBatchesGrowAgainWithinASweep(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.set(nil, time.Hour) // duration of a batch
		for n := range 2000 {
			w.hold(t, fmt.Sprint(n), -time.Second)
		}
		stop := run(t, newSweeper(t, w, expiry.SweeperConfig{}))
		defer stop()
		time.Sleep(20 * time.Minute)
		before, _ := w.counts()
		w.set(nil, 10*time.Millisecond)
		time.Sleep(3 * time.Minute)
		after, _ := w.counts()
		if left := len(w.table.Active()); left > 0 || after-before > 25 {
			t.Errorf("%d of 2000 rows are left after %d batches", left, after-before)
		}
	})
}

func TestStuckCallIsReported(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.hold(t, "row", -time.Second)
		var once sync.Once
		sw := newSweeper(t, w.emitting(t, func(context.Context, []expiry.Row) error {
			once.Do(func() { time.Sleep(10 * time.Minute) }) // ignores its context
			return nil
		}), expiry.SweeperConfig{})
		stop := run(t, sw)
		defer stop()
		time.Sleep(time.Minute)
		if err := sw.Ready(t.Context()); err == nil || !strings.Contains(err.Error(), "stuck") {
			t.Errorf("Ready returned %v while a batch is stuck", err)
		}
		time.Sleep(15 * time.Minute)
		if err := sw.Ready(t.Context()); err != nil || len(w.table.Active()) > 0 {
			t.Errorf("Ready returned %v, and %d rows are left, after the batch", err, len(w.table.Active()))
		}
	})
}
