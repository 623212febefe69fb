package main

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestDriveCountsWhatEndsInTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l, err := drive(t.Context(), 3, time.Second, func(_ context.Context, worker int) error {
			time.Sleep(time.Duration(worker+1) * 150 * time.Millisecond)
			if worker == 2 {
				return errGaveUp
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		// Worker 0 ends 6 in time and 1 late, worker 1 ends 3 and 1; worker 2 gives up 3 times.
		if l.rate != 9 || l.done != 11 || l.gaveUp != 3 || len(l.waits) != 14 {
			t.Errorf("rate %v, done %d, gave up %d, waits %d; want 9, 11, 3, 14", l.rate, l.done, l.gaveUp, len(l.waits))
		}
		if got := l.percentile(1); got != 450*time.Millisecond {
			t.Errorf("longest wait %v, want 450ms", got)
		}
		if got := l.percentile(0.5); got != 150*time.Millisecond {
			t.Errorf("median wait %v, want 150ms", got)
		}
	})
}

func TestDriveEndsAtTheFirstError(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		broken := errors.New("broken")
		start := time.Now()
		_, err := drive(t.Context(), 2, time.Hour, func(ctx context.Context, worker int) error {
			if worker == 0 {
				return broken
			}
			<-ctx.Done()
			return ctx.Err()
		})
		if !errors.Is(err, broken) || time.Since(start) != 0 {
			t.Errorf("drive: %v after %v, want %v at once", err, time.Since(start), broken)
		}
	})
}

func TestFairShare(t *testing.T) {
	t.Parallel()
	// Four callers of one row in a closed circle: each finds four, itself included, and waits four turns.
	one := make([]queue, 1)
	for range 4 {
		one[0].join()
	}
	var waits []time.Duration
	for range 5 {
		one[0].leave()
		one[0].join()
		waits = append(waits, 40*time.Millisecond)
	}
	one[0].joined.Store(5 * 4)
	if got := fairShare(waits, one); got != 40*time.Millisecond {
		t.Errorf("one row: %v, want 40ms", got)
	}

	// A second row with one caller, who waits one turn: the longest queue still decides.
	two := make([]queue, 2)
	two[0].joined.Store(4)
	two[0].longest.Store(4)
	two[1].join()
	if got := fairShare([]time.Duration{40 * time.Millisecond, 10 * time.Millisecond}, two); got != 40*time.Millisecond {
		t.Errorf("two rows: %v, want 40ms", got)
	}
}
