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

func TestPace(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		pace := load.NewPace(100)
		l, err := load.Drive(t.Context(), 3, time.Second, func(ctx context.Context, worker int) error {
			if err := pace.Wait(ctx); err != nil {
				return err
			}
			if worker == 0 {
				time.Sleep(200 * time.Millisecond) // the others do what this one does not
			}
			return nil
		})
		if err != nil || l.Rate < 95 || l.Rate > 101 {
			t.Errorf("%v a second (%v), want 100", l.Rate, err)
		}
	})
}
