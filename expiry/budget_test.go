package expiry_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/expiry"
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
		cfg.Hooks.OnBatch = func(_ context.Context, b expiry.Batch, soFar expiry.Report) {
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
