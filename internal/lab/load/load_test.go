package load_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/load"
)

func TestDriveCountsWhatEndsInTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l, err := load.Drive(t.Context(), 3, time.Second, func(_ context.Context, worker int) error {
			time.Sleep(time.Duration(worker+1) * 150 * time.Millisecond)
			if worker == 2 {
				return load.ErrGaveUp
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		// Worker 0 ends 6 in time and 1 late, worker 1 ends 3 and 1; worker 2 gives up 3 times.
		if l.Rate != 9 || l.Done != 11 || l.GaveUp != 3 || len(l.Waits) != 14 {
			t.Errorf("rate %v, done %d, gave up %d, waits %d; want 9, 11, 3, 14", l.Rate, l.Done, l.GaveUp, len(l.Waits))
		}
		if got := l.Percentile(1); got != 450*time.Millisecond {
			t.Errorf("longest wait %v, want 450ms", got)
		}
		if got := l.Percentile(0.5); got != 150*time.Millisecond {
			t.Errorf("median wait %v, want 150ms", got)
		}
	})
}

func TestDriveEndsAtTheFirstError(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		broken := errors.New("broken")
		start := time.Now()
		_, err := load.Drive(t.Context(), 2, time.Hour, func(ctx context.Context, worker int) error {
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

func TestDriveAtKeepsItsPace(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l, err := load.DriveAt(t.Context(), 3, 100, time.Second, func(_ context.Context, worker int) error {
			if worker == 0 {
				time.Sleep(200 * time.Millisecond) // the others do what this one does not
			}
			return nil
		})
		if err != nil || l.Done != 100 || l.Rate < 99 || l.Missed != 0 {
			t.Errorf("%d are done, %v a second, %d are missed (%v); want 100", l.Done, l.Rate, l.Missed, err)
		}
	})
}

// Goroutines that wait for their turn are not slow.
func TestDriveAtCountsFromWhenItIsDue(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l, err := load.DriveAt(t.Context(), 3, 10, time.Second, func(context.Context, int) error {
			time.Sleep(20 * time.Millisecond)
			return nil
		})
		if err != nil || l.Done != 10 || l.Percentile(0) != 20*time.Millisecond || l.Percentile(1) != 20*time.Millisecond {
			t.Errorf("%d operations of 20ms took %v to %v (%v)", l.Done, l.Percentile(0), l.Percentile(1), err)
		}
	})
}

// A stall delays all that is due meanwhile, not only the operation that stalls.
func TestDriveAtDoesNotOmitAStall(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		stall := 500 * time.Millisecond
		l, err := load.DriveAt(t.Context(), 1, 100, time.Second, func(context.Context, int) error {
			time.Sleep(stall)
			stall = 0
			return nil
		})
		if err != nil || l.Done != 100 || len(l.Waits) != 100 {
			t.Fatalf("%d are done, %d waits (%v); want 100", l.Done, len(l.Waits), err)
		}
		late := 0
		for i, wait := range l.Waits[50:] { // those of the first half second: 10, 20 … 500 ms
			if wait == time.Duration(i+1)*10*time.Millisecond {
				late++
			}
		}
		if late != 50 || l.Percentile(0.49) != 0 {
			t.Errorf("%d operations waited as long as the stall lasted from when they were due, want 50: %v", late, l.Waits)
		}
	})
}

func TestDriveAtCountsWhatItMisses(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l, err := load.DriveAt(t.Context(), 2, 10, time.Second, func(context.Context, int) error {
			time.Sleep(900 * time.Millisecond)
			return nil
		})
		// Those due at 0 and 0.1 s begin then, the third at 0.9 s. At 1 s nothing begins any more.
		if err != nil || l.Done != 3 || l.Missed != 7 || len(l.Waits) != 10 {
			t.Errorf("%d done, %d missed, %d waits (%v); want 3, 7, 10", l.Done, l.Missed, len(l.Waits), err)
		}
		if got := l.Percentile(0); got != 100*time.Millisecond {
			t.Errorf("the least wait is %v, want 100ms of what was due at 0.9 s", got)
		}
	})
}

func TestDriveAtEndsWithItsContext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 90*time.Minute)
		defer cancel()
		l, err := load.DriveAt(ctx, 2, 1.0/3600, 24*time.Hour, func(context.Context, int) error { return nil })
		if !errors.Is(err, context.DeadlineExceeded) || l.Done != 2 || l.Missed != 0 {
			t.Errorf("%d are done, %d missed (%v), want 2, none and %v", l.Done, l.Missed, err, context.DeadlineExceeded)
		}
	})
}
