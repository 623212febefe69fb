package txretry

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

func wanting(key string) *call { return &call{opts: Options{SerialKey: key}} }

func TestTurnsAreFirstComeFirstServed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var all turns
		var order []int
		all.wait(all.enter(t.Context(), wanting("seat:1")))
		for i := range 10 {
			go func() {
				all.wait(all.enter(t.Context(), wanting("seat:1")))
				defer all.pass("seat:1")
				order = append(order, i) // the race detector would see two at once
				time.Sleep(time.Second)
			}()
			synctest.Wait()
		}
		all.wait(all.enter(t.Context(), wanting("seat:2"))) // another key is free
		all.pass("seat:2")
		all.pass("seat:1")
		time.Sleep(11 * time.Second)
		synctest.Wait()
		if !slices.IsSorted(order) || len(order) != 10 {
			t.Errorf("order = %v", order)
		}
		if len(all.lines) != 0 {
			t.Errorf("%d keys are left behind", len(all.lines))
		}
	})
}

func TestTurnGivenUpByContext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var all turns
		all.wait(all.enter(t.Context(), wanting("k")))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, left := all.wait(all.enter(ctx, wanting("k"))); !left {
			t.Error("called although the key is held")
		}
		all.pass("k")
		if _, left := all.wait(all.enter(t.Context(), wanting("k"))); left {
			t.Error("not called")
		}
		all.pass("k")
		if len(all.lines) != 0 {
			t.Errorf("%d keys are left behind", len(all.lines))
		}
	})
}
