package expiry_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
)

func TestBudgetsEndASweepAndRunGoesOn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		for n := range 100 {
			w.hold(t, fmt.Sprint(n), -time.Minute)
		}
		w.set(nil, time.Second) // per batch
		cfg := expiry.SweeperConfig{BatchSize: 10, MaxBatches: 2}
		var batches []int
		cfg.Hooks.OnBatch = func(_ context.Context, b driver.Batch, soFar expiry.Report) {
			batches = append(batches, b.Expired, soFar.Expired)
		}
		if r, err := newSweeper(t, w, cfg).Sweep(t.Context()); err != nil || !r.More || r.Batches != 2 || r.Expired != 20 {
			t.Errorf("got %+v, %v, want two batches and more", r, err)
		}
		if want := []int{10, 10, 10, 20}; !slices.Equal(batches, want) {
			t.Errorf("the batches were told as %v, want %v", batches, want)
		}
		cfg = expiry.SweeperConfig{BatchSize: 10, MaxDuration: 3 * time.Second}
		sw := newSweeper(t, w, cfg)
		if r, err := sw.Sweep(t.Context()); err != nil || !r.More || r.Expired != 30 {
			t.Errorf("got %+v, %v, want what fits into three seconds", r, err)
		}
		stop := run(t, sw)
		defer stop()
		time.Sleep(8 * time.Second)
		if left := len(w.table.Active()); left != 0 {
			t.Errorf("%d rows are left", left)
		}
	})
}

// A budget that one sweep after the other uses up on other rows does not keep
// those from expiring that were in a batch with a bad one.
func TestBudgetLeavesRoomForTheSearch(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]expiry.SweeperConfig{
		"batches": {MaxBatches: 1}, "duration": {MaxDuration: time.Second},
	} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t)
			store := w.emitting(t, func(_ context.Context, rows []expiry.Row) error {
				time.Sleep(2 * time.Second)
				if has(rows, "bad") {
					return errors.New("bad row")
				}
				return nil
			})
			w.hold(t, "bad", -time.Minute)
			for n := range 10 {
				w.hold(t, fmt.Sprint(n), -time.Second)
			}
			stop := run(t, newSweeper(t, store, cfg))
			defer stop()
			time.Sleep(2 * time.Minute)
			if left := len(w.table.Active()); left != 1 {
				t.Errorf("%s: %d rows are left, want the bad one", name, left)
			}
		})
	}
}

// However little time a sweep may take, it begins a batch.
func TestSweepBeginsABatchWhateverItsBudget(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := &checked{world: newWorld(t), slow: time.Second}
		c.hold(t, "row", -time.Minute)
		r, err := newSweeper(t, c, expiry.SweeperConfig{MaxDuration: time.Second}).Sweep(t.Context())
		if err != nil || r.Expired != 1 {
			t.Errorf("got %+v, %v, want the row expired", r, err)
		}
	})
}
