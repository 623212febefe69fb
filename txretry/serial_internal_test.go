package txretry

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

func TestTurnsAreFirstComeFirstServed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var all turns
		var order []int
		leave, err := all.enter(t.Context(), "seat:1")
		if err != nil {
			t.Fatal(err)
		}
		for i := range 10 {
			go func() {
				leave, err := all.enter(t.Context(), "seat:1")
				if err != nil {
					t.Error(err)
					return
				}
				defer leave()
				order = append(order, i) // the race detector would see two at once
				time.Sleep(time.Second)
			}()
			synctest.Wait()
		}
		if other, err := all.enter(t.Context(), "seat:2"); err != nil {
			t.Error(err)
		} else {
			other() // another key is free
		}
		leave()
		time.Sleep(11 * time.Second)
		synctest.Wait()
		if !slices.IsSorted(order) || len(order) != 10 {
			t.Errorf("order = %v", order)
		}
		if len(all.queues) != 0 {
			t.Errorf("%d keys are left behind", len(all.queues))
		}
	})
}

func TestTurnGivenUpByContext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var all turns
		leave, _ := all.enter(t.Context(), "k")
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := all.enter(ctx, "k"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error = %v", err)
		}
		leave()
		again, err := all.enter(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		again()
		if len(all.queues) != 0 {
			t.Errorf("%d keys are left behind", len(all.queues))
		}
	})
}
