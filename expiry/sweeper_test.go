package expiry_test

import (
	"context"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/internal/ids"
)

func TestShortHoldExpiresOnTimeWithTheHalfHourSchedule(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		before := w.hold(t, "before", 2*time.Second)
		overdue := w.hold(t, "overdue", -time.Hour)
		start := time.Now()
		sw := newSweeper(t, w, expiry.SweeperConfig{})
		defer run(t, sw)()
		synctest.Wait()
		w.expiredWithin(t, "overdue", overdue, time.Hour+time.Since(start))

		time.Sleep(10 * time.Second)
		w.expiredWithin(t, "before", before, time.Second)

		woken := w.hold(t, "woken", 2*time.Second)
		w.Wake(woken)
		time.Sleep(10 * time.Second)
		w.expiredWithin(t, "woken", woken, time.Second)

		foreign := w.hold(t, "foreign", 15*time.Minute) // made by another process: no Wake
		time.Sleep(16 * time.Minute)
		w.expiredWithin(t, "foreign", foreign, time.Second)
	})
}

// An hour in which nothing is due, the sweeps of the schedule included, asks at
// most one query a minute, and holds with time to spare add none.
func TestIdleCostsAtMostOneQueryAMinute(t *testing.T) {
	t.Parallel()
	for name, schedule := range map[string]string{"default": "", "never": "@never"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				w.hold(t, "far off", 24*time.Hour)
				sw := newSweeper(t, w, expiry.SweeperConfig{Schedule: schedule})
				stop := run(t, sw)
				time.Sleep(37 * time.Second)
				startBatches, startLooks := w.counts()
				for range 60 {
					time.Sleep(time.Minute)
					w.Wake(time.Now().Add(15 * time.Minute)) // a hold that has time
				}
				stop()
				batches, looks := w.counts()
				batches, looks = batches-startBatches, looks-startLooks
				const perBatch = 3 // begin, claim, commit
				if cost := looks + batches*perBatch; cost > 60 || looks == 0 {
					t.Errorf("an idle hour cost %d statements: %d batches and %d looks", cost, batches, looks)
				}
			})
		})
	}
}

// A sweep of the schedule between two looks delays neither a row that the first
// of them saw, nor one that Wake told of, nor one that it did not.
func TestScheduledSweepDelaysNoRow(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		every, made, due time.Duration
		wake             bool
	}{
		"seen by the look":       {50 * time.Second, 0, 70 * time.Second, false},
		"woken behind the look":  {50 * time.Second, 10 * time.Second, 70 * time.Second, true},
		"woken before the look":  {50 * time.Second, 10 * time.Second, 55 * time.Second, true},
		"unseen, long enough":    {50 * time.Second, 10 * time.Second, 72 * time.Second, false},
		"seen, frequent sweeps":  {30 * time.Second, 0, 100 * time.Second, false},
		"woken, frequent sweeps": {30 * time.Second, 10 * time.Second, 100 * time.Second, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				var deadline time.Time
				if tc.made == 0 {
					deadline = w.hold(t, "row", tc.due)
				}
				sw := newSweeper(t, w, expiry.SweeperConfig{Schedule: "@every " + tc.every.String(), PollInterval: time.Minute})
				defer run(t, sw)()
				time.Sleep(tc.made)
				if tc.made > 0 {
					deadline = w.hold(t, "row", tc.due-tc.made)
				}
				if tc.wake {
					w.Wake(deadline)
				}
				time.Sleep(5 * time.Minute)
				w.expiredWithin(t, "row", deadline, time.Second)
			})
		})
	}
}

// The store's clock decides, however wrong this host's is.
func TestSkewedClock(t *testing.T) {
	t.Parallel()
	for _, skew := range []time.Duration{5 * time.Minute, -5 * time.Minute} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t)
			w.ahead = skew
			sw := newSweeper(t, w, expiry.SweeperConfig{})
			defer run(t, sw)()
			synctest.Wait()
			real := time.Now()
			w.Wake(w.hold(t, "row", 2*time.Second))
			time.Sleep(10 * time.Second)
			w.expiredWithin(t, "row", real.Add(2*time.Second), time.Second)
		})
	}
}

func TestOneSweepAtATime(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.set(nil, time.Second)
		sw := newSweeper(t, w, expiry.SweeperConfig{})
		start := time.Now()
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				if _, err := sw.Sweep(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if took := time.Since(start); took != 3*time.Second {
			t.Errorf("three sweeps took %v, want them one after the other", took)
		}
	})
}

func TestNewSweeperReportsEveryViolation(t *testing.T) {
	t.Parallel()
	_, err := expiry.NewSweeper(nil, expiry.SweeperConfig{
		Schedule: "now and then", BatchSize: -1, BatchTimeout: -1, PollInterval: 91 * time.Second, Quarantine: -1, ShutdownTimeout: -1,
	})
	for _, want := range []string{"store", "Schedule", "BatchSize", "BatchTimeout", "PollInterval", "Quarantine", "ShutdownTimeout"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not name %s", err, want)
		}
	}
}

func TestEventID(t *testing.T) {
	t.Parallel()
	deadline := at("2026-11-20T10:00:00.123456Z")
	id := expiry.EventID("reservation.expired", "42", deadline)
	if err := ids.Check(id); err != nil {
		t.Error(err)
	}
	if again := expiry.EventID("reservation.expired", "42", deadline.Local()); again != id {
		t.Errorf("the same expiry has the ids %s and %s", id, again)
	}
	for _, other := range []string{
		expiry.EventID("reservation.expired", "43", deadline).String(),
		expiry.EventID("hold.expired", "42", deadline).String(),
		expiry.EventID("reservation.expired", "42", deadline.Add(time.Microsecond)).String(),
	} {
		if other == id.String() {
			t.Errorf("two expiries share the id %s", id)
		}
	}
}

// Without a schedule of its own a sweeper sweeps at its start, on the hour and half
// past, and at no other time.
func TestDefaultSchedule(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(7 * time.Minute) // the bubble begins at midnight
		w := newWorld(t)
		stop := run(t, newSweeper(t, w, expiry.SweeperConfig{}))
		time.Sleep(2 * time.Hour)
		stop()
		var sweeps []string
		for _, at := range w.swept() {
			sweeps = append(sweeps, at.UTC().Format("15:04:05"))
		}
		if want := []string{"00:07:00", "00:30:00", "01:00:00", "01:30:00", "02:00:00"}; !slices.Equal(sweeps, want) {
			t.Errorf("swept at %v, want %v", sweeps, want)
		}
	})
}

// Run goes on where its context cannot be cancelled.
func TestRunOnBackground(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		returned := false
		ended := make(chan struct{})
		sw := newSweeper(t, leaving{w, time.Now().Add(time.Hour)}, expiry.SweeperConfig{})
		go func() {
			defer close(ended)
			if err := sw.Run(context.Background()); err != nil {
				t.Error(err)
			}
			returned = true
		}()
		time.Sleep(time.Second)
		deadline := w.hold(t, "row", time.Second)
		w.Wake(deadline)
		time.Sleep(10 * time.Second)
		w.expiredWithin(t, "row", deadline, time.Second)
		if err := sw.Ready(t.Context()); err != nil {
			t.Error(err)
		}
		<-ended
		if returned {
			t.Error("Run returned")
		}
	})
}

// leaving ends the goroutine of its caller when the time has come, the only way to
// end a Run that is told by nobody.
type leaving struct {
	*world
	at time.Time
}

func (s leaving) Look(ctx context.Context, skip []string) (driver.Outlook, error) {
	if time.Now().After(s.at) {
		runtime.Goexit()
	}
	return s.world.Look(ctx, skip)
}

// twice is a schedule that comes at two times and never again.
type twice [2]time.Time

func (s twice) Next(t time.Time) time.Time {
	for _, at := range s {
		if at.After(t) {
			return at
		}
	}
	return time.Time{}
}

// A schedule is kept to the moment, due rows or not, and may end: what is due
// expires all the same.
func TestScheduleThatEnds(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		start := time.Now()
		s := twice{start.Add(10*time.Minute + time.Millisecond), start.Add(40 * 24 * time.Hour)}
		sw := newSweeper(t, w, expiry.SweeperConfig{}).Tune(expiry.Tuning{Schedule: s, PollInterval: 60 * 24 * time.Hour})
		stop := run(t, sw)
		time.Sleep(50 * 24 * time.Hour)
		deadline := w.hold(t, "row", time.Hour+time.Microsecond)
		w.Wake(deadline)
		time.Sleep(2 * time.Hour)
		stop()
		w.expiredWithin(t, "row", deadline, time.Second)
		var sweeps []time.Duration
		for _, at := range w.swept() {
			sweeps = append(sweeps, at.Sub(start))
		}
		want := []time.Duration{0, s[0].Sub(start), s[1].Sub(start), deadline.Sub(start)}
		if !slices.Equal(sweeps, want) {
			t.Errorf("swept at %v, want %v", sweeps, want)
		}
	})
}
