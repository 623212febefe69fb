package inboxamqp

import (
	"testing"
	"testing/synctest"
	"time"
)

// One that runs alone and does not end keeps the others waiting for no longer than its patience.
func TestAloneForLong(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		turns := newTurns(3)
		for range 2 {
			release := turns.alone(time.Minute)
			began := time.Now()
			turns.share()()
			if waited := time.Since(began); waited != time.Minute {
				t.Errorf("waited %v", waited)
			}
			release()
		}
		synctest.Wait()
		if len(turns.places) != 0 || len(turns.door) != 0 {
			t.Errorf("%d places taken, %d at the door", len(turns.places), len(turns.door))
		}
	})
}

// The one that runs alone waits for the others and keeps new ones out, though not for ever.
func TestTurns(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		turns := newTurns(3)
		began := time.Now()
		run := func(begin func() func(), d time.Duration, want time.Duration) {
			release := begin()
			if waited := time.Since(began); waited != want {
				t.Errorf("began after %v, want %v", waited, want)
			}
			time.Sleep(d)
			release()
		}
		go run(turns.share, 2*time.Second, 0)
		go run(turns.share, 5*time.Second, 0)
		synctest.Wait()
		go run(func() func() { return turns.alone(time.Minute) }, time.Second, 5*time.Second)
		synctest.Wait()
		go run(turns.share, time.Hour, 6*time.Second)
		synctest.Wait()
		go run(func() func() { return turns.alone(time.Minute) }, time.Second, 66*time.Second) // the hour is too long for it
		time.Sleep(2 * time.Hour)
		synctest.Wait()
		if len(turns.places) != 0 || len(turns.door) != 0 {
			t.Errorf("%d places taken, %d at the door", len(turns.places), len(turns.door))
		}
	})
}
