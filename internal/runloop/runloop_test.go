package runloop_test

import (
	"context"
	"errors"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func TestDetachLivesOnForTheGrace(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		work, release := runloop.Detach(ctx, 10*time.Second)
		defer release()
		cancel()
		time.Sleep(9 * time.Second)
		synctest.Wait()
		if work.Err() != nil {
			t.Fatal("the work was cancelled within its grace")
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if !errors.Is(work.Err(), context.Canceled) {
			t.Fatal("the work outlived its grace")
		}
	})
}

func TestDetachReleased(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		work, release := runloop.Detach(ctx, time.Hour)
		cancel()
		synctest.Wait()
		release() // the bubble fails if a goroutine is left
		if work.Err() == nil {
			t.Fatal("release did not end the work")
		}
	})
}

func TestSleep(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		if err := runloop.Sleep(t.Context(), time.Minute); err != nil || time.Since(start) != time.Minute {
			t.Errorf("slept %v, error %v", time.Since(start), err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := runloop.Sleep(ctx, time.Hour); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error = %v, want DeadlineExceeded", err)
		}
	})
}
