package breaker_test

import (
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/internal/breaker"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestBreaker(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(3, time.Second)
		for n := range 10 { // a success between keeps it closed
			if !b.Enter() {
				t.Fatalf("closed after %d calls", n)
			}
			if b.Done(n%3 == 2) {
				t.Fatal("turned although never three failed in a row")
			}
		}
		b.Done(true)
		for n := range 3 {
			if !b.Enter() || b.Done(false) != (n == 2) {
				t.Fatalf("failure %d", n)
			}
		}
		if b.Enter() {
			t.Error("open, and lets a call pass")
		}
		time.Sleep(time.Second)
		var passed atomic.Int32
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() {
				if b.Enter() {
					passed.Add(1)
				}
			})
		}
		wg.Wait()
		if passed.Load() != 1 {
			t.Errorf("%d probes passed, want 1", passed.Load())
		}
		if b.Done(false) || b.Enter() {
			t.Error("a failed probe closed it")
		}
		time.Sleep(time.Second)
		if !b.Enter() || b.Enter() { // the prober gave up: the next one may try a pause later
			t.Error("want one probe per pause")
		}
		time.Sleep(time.Second)
		if !b.Enter() || !b.Done(true) || !b.Enter() || !b.Enter() {
			t.Error("a probe that succeeds closes it")
		}
	})
}

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }
