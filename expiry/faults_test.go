package expiry_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirytest"
)

func TestPassingFaultIsBackedOff(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		sw := newSweeper(t, w, expiry.SweeperConfig{})
		if err := sw.Ready(t.Context()); !errors.Is(err, expiry.ErrNotReady) {
			t.Errorf("ready before Run: %v", err)
		}
		w.set(errors.New("server is down"), 0)
		stop := run(t, sw)
		time.Sleep(10 * time.Minute)
		if err := sw.Ready(t.Context()); !errors.Is(err, expiry.ErrNotReady) {
			t.Errorf("ready while the store fails: %v", err)
		}
		if batches, looks := w.counts(); batches+looks > 60 {
			t.Errorf("10 minutes of downtime cost %d batches and %d looks", batches, looks)
		}
		w.hold(t, "row", -time.Second)
		w.set(nil, 0)
		time.Sleep(time.Minute)
		if _, state, _ := w.table.Get("row"); state != expirytest.Expired {
			t.Errorf("row is %s after the store came back", state)
		}
		if err := sw.Ready(t.Context()); err != nil {
			t.Errorf("not ready: %v", err)
		}
		stop()
		if err := sw.Ready(t.Context()); !errors.Is(err, expiry.ErrNotReady) {
			t.Errorf("ready after Run: %v", err)
		}
	})
}

func TestShutdownFinishesTheBatchInHand(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		for n := range 10 {
			w.hold(t, fmt.Sprint(n), -time.Second)
		}
		w.set(nil, 3*time.Second)
		stop := run(t, newSweeper(t, w, expiry.SweeperConfig{BatchSize: 4, ShutdownTimeout: 5 * time.Second}))
		time.Sleep(time.Second)
		start := time.Now()
		stop()
		if took := time.Since(start); took != 2*time.Second {
			t.Errorf("shutdown took %v, want the rest of the batch, 2s", took)
		}
		if left := len(w.table.Active()); left != 6 {
			t.Errorf("%d rows are left, want 6", left)
		}
	})
}

func TestShutdownTimeoutAndBatchTimeout(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.set(nil, time.Hour)
		stop := run(t, newSweeper(t, w, expiry.SweeperConfig{ShutdownTimeout: 5 * time.Second}))
		time.Sleep(time.Second)
		start := time.Now()
		stop()
		if took := time.Since(start); took != 5*time.Second {
			t.Errorf("shutdown took %v, want 5s", took)
		}

		start = time.Now()
		_, err := newSweeper(t, w, expiry.SweeperConfig{BatchTimeout: 7 * time.Second}).Sweep(t.Context())
		if took := time.Since(start); !errors.Is(err, context.DeadlineExceeded) || took != 7*time.Second {
			t.Errorf("a stuck batch ended after %v with %v", took, err)
		}
	})
}

func TestQuarantineEndsAndIsBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		var mu sync.Mutex
		bad := true
		store, err := expirytest.NewStore(w.manager, expirytest.Config{Active: w.table.Active, Expire: w.table.Expire,
			Emit: func(context.Context, pgx.Tx, []expiry.Row) error {
				mu.Lock()
				defer mu.Unlock()
				if bad {
					return errors.New("bad row")
				}
				return nil
			}})
		if err != nil {
			t.Fatal(err)
		}
		for n := range 5 {
			w.hold(t, fmt.Sprint(n), -time.Second)
		}
		cfg := expiry.SweeperConfig{MaxQuarantine: 3, Quarantine: time.Minute}
		if r, err := newSweeper(t, store, cfg).Sweep(t.Context()); !errors.Is(err, expiry.ErrQuarantineFull) || r.Poisoned != 3 {
			t.Errorf("got %+v, %v, want ErrQuarantineFull after 3", r, err)
		}
		cfg.MaxQuarantine = 5
		stop := run(t, newSweeper(t, store, cfg))
		time.Sleep(30 * time.Second)
		mu.Lock()
		bad = false
		mu.Unlock()
		if left := len(w.table.Active()); left != 5 {
			t.Errorf("%d rows are left in quarantine, want 5", left)
		}
		time.Sleep(time.Minute)
		stop()
		if left := len(w.table.Active()); left != 0 {
			t.Errorf("%d rows are left after the quarantine", left)
		}
	})
}

type panics struct{}

func (panics) SweepBatch(context.Context, expiry.Request) (expiry.Batch, error) { panic("boom") }
func (panics) NextDue(context.Context, []string) (time.Duration, bool, error)   { panic("boom") }

func TestPanickingStoreDoesNotEndRun(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		stop := run(t, newSweeper(t, panics{}, expiry.SweeperConfig{}))
		time.Sleep(time.Minute)
		stop()
	})
}
