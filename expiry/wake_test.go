package expiry_test

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/expiry"
)

// What comes in during the schedule's own sweep is not lost.
func TestWakeDuringAScheduledSweep(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		sw := newSweeper(t, w, expiry.SweeperConfig{Schedule: "@every 10m"}).Tune(expiry.Tuning{PollInterval: time.Hour})
		defer run(t, sw)()
		synctest.Wait()
		w.set(nil, 2*time.Second) // how long a batch takes
		time.Sleep(10*time.Minute + time.Second)
		w.set(nil, 0)
		time.Sleep(900 * time.Millisecond)
		deadline := w.hold(t, "row", 5*time.Second) // the sweep's transaction may have begun before it
		w.Wake(deadline)
		time.Sleep(20 * time.Second)
		w.expiredWithin(t, "row", deadline, time.Second)
	})
}

func TestWakeLooksOnlyForWhatComesBeforeTheNextLook(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		sw := newSweeper(t, w, expiry.SweeperConfig{Schedule: "@never"})
		defer run(t, sw)()
		time.Sleep(time.Second)
		_, before := w.counts()
		for range 1000 {
			w.Wake(w.hold(t, "later", 15*time.Minute))
			time.Sleep(10 * time.Millisecond)
		}
		if _, looks := w.counts(); looks != before {
			t.Errorf("holds that have time cost %d looks", looks-before)
		}
		first := w.hold(t, "first", 20*time.Second)
		w.Wake(first)
		time.Sleep(time.Second)
		for n := range 10 {
			w.Wake(w.hold(t, fmt.Sprint("behind ", n), 30*time.Second))
		}
		time.Sleep(time.Second)
		if _, looks := w.counts(); looks != before+1 {
			t.Errorf("the earliest deadline and later ones cost %d looks, want one", looks-before)
		}
		time.Sleep(40 * time.Second)
		w.expiredWithin(t, "first", first, time.Second)
		if left := len(w.table.Active()); left != 1 {
			t.Errorf("%d rows are left, want the one that has time", left)
		}
	})
}

func TestWakesCoalesce(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		sw := newSweeper(t, w, expiry.SweeperConfig{})
		stop := run(t, sw)
		synctest.Wait()
		for range 1000 {
			w.Wake(time.Time{})
			time.Sleep(time.Millisecond)
		}
		stop()
		if _, looks := w.counts(); looks > 12 {
			t.Errorf("1000 wakes in a second cost %d looks", looks)
		}
	})
}

// Each call of Run hears of every Wake, whatever becomes of the other.
func TestWakeReachesTheRunThatIsLeft(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		sw := newSweeper(t, w, expiry.SweeperConfig{}).Tune(expiry.Tuning{PollInterval: time.Hour})
		defer run(t, sw)()
		time.Sleep(time.Second)
		stopSecond := run(t, sw)
		time.Sleep(time.Second)
		stopSecond()
		deadline := w.hold(t, "row", 2*time.Second)
		w.Wake(deadline)
		time.Sleep(10 * time.Second)
		w.expiredWithin(t, "row", deadline, time.Second)
	})
}

// Who has reached the store ends the pause that its failure brought about, but does
// not have a store that goes on failing swept at every turn.
func TestWakeEndsThePauseAfterAFault(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.set(errors.New("server is down"), 0)
		sw := newSweeper(t, w, expiry.SweeperConfig{Rand: func() float64 { return 0.5 }}).Tune(expiry.Tuning{MaxBackoff: time.Hour})
		defer run(t, sw)()
		time.Sleep(time.Hour)
		before, _ := w.counts()
		for range 100 {
			w.Wake(time.Time{})
			time.Sleep(100 * time.Millisecond)
		}
		if batches, _ := w.counts(); batches-before > 11 {
			t.Errorf("10 seconds of wake-ups cost %d batches", batches-before)
		}
		time.Sleep(10 * time.Second)
		before, _ = w.counts()
		w.Wake(time.Now().Add(time.Second)) // a deadline says nothing about the store
		time.Sleep(10 * time.Second)
		if batches, _ := w.counts(); batches != before {
			t.Errorf("a deadline cost %d batches", batches-before)
		}
		w.set(nil, 0)
		deadline := w.hold(t, "row", 0)
		w.Wake(time.Time{})
		time.Sleep(time.Minute)
		w.expiredWithin(t, "row", deadline, time.Second)
	})
}
