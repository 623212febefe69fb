package core

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// A change ends the running read and starts next, however many readers wait. Nobody reads beside it.
func TestTurn_changesFirst(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		one, reads := newTurn(), 0
		var rejected atomic.Int32
		readFor := func(d time.Duration) {
			err := one.read(t.Context(), func(ctx context.Context) error {
				reads++
				select {
				case <-time.After(d):
					return nil
				case <-ctx.Done():
					time.Sleep(time.Second) // it returns what it holds
					return ctx.Err()
				}
			})
			if errors.Is(err, errChanged) {
				rejected.Add(1)
			} else if err != nil {
				t.Error(err)
			}
		}
		for range 20 {
			go readFor(time.Hour)
		}
		synctest.Wait()
		began := time.Now()
		changes := 0
		change := func() {
			if err := one.change(t.Context(), func() error {
				changes++
				go readFor(time.Hour)
				time.Sleep(time.Minute)
				return nil
			}); err != nil {
				t.Error(err)
			}
		}
		var both sync.WaitGroup
		both.Go(change)
		both.Go(change)
		both.Wait()
		synctest.Wait()
		if took := time.Since(began); took != time.Second+2*time.Minute || reads != 1 || rejected.Load() != 22 || changes != 2 {
			t.Errorf("after %v: %d reads, %d were rejected, %d changes", took, reads, rejected.Load(), changes)
		}
		if readFor(time.Second); reads != 2 {
			t.Errorf("%d reads after the changes, want 2", reads)
		}
		ended, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		go readFor(time.Minute)
		synctest.Wait()
		if err := one.read(ended, nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a read that waits for a second ends with %v", err)
		}
		time.Sleep(time.Hour)
	})
}
