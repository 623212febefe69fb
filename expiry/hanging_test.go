package expiry_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

// One row on which Emit hangs until BatchTimeout takes the others of its batch
// along for minutes at worst, but nobody else.
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
		for n := range 60 { // rows that fall due while the search goes on
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

// A row in quarantine that hangs when it is tried again, by itself, says nothing
// about the batches of the others: they keep their size.
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
		for range 2 { // once by itself as well
			if _, err := sw.Sweep(t.Context()); err == nil {
				t.Fatal("the bad row has not run into BatchTimeout")
			}
		}
		for range 10 { // sweeps that go through: the batches grow again
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

// A stall of the server while a row is being expired is not the row's fault.
func TestStallAccusesNoRow(t *testing.T) {
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

// Batches that an outage has made small grow again within the sweep that expires
// what it has left behind.
func TestBatchesGrowAgainWithinASweep(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.set(nil, time.Hour) // how long a batch takes
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
			once.Do(func() { time.Sleep(10 * time.Minute) }) // whatever its context says
			return nil
		}), expiry.SweeperConfig{})
		stop := run(t, sw)
		defer stop()
		time.Sleep(time.Minute)
		if err := sw.Ready(t.Context()); err == nil || !strings.Contains(err.Error(), "stuck") {
			t.Errorf("Ready says %v while a batch is stuck", err)
		}
		time.Sleep(15 * time.Minute)
		if err := sw.Ready(t.Context()); err != nil || len(w.table.Active()) > 0 {
			t.Errorf("Ready says %v, and %d rows are left, when it no longer is", err, len(w.table.Active()))
		}
	})
}
