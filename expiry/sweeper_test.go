package expiry_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/metrictest"
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

// An hour without due rows costs at most one query a minute, including the sweeps of the schedule. Holds with later
// deadlines add none.
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
				startBatches, startQueries := w.counts()
				for range 60 {
					time.Sleep(time.Minute)
					w.Wake(time.Now().Add(15 * time.Minute)) // a hold with a later deadline
				}
				stop()
				batches, queries := w.counts()
				batches, queries = batches-startBatches, queries-startQueries
				const perBatch = 3 // begin, claim, commit
				if cost := queries + batches*perBatch; cost > 60 || queries == 0 {
					t.Errorf("an idle hour cost %d statements: %d batches and %d queries", cost, batches, queries)
				}
			})
		})
	}
}

// A sweep of the schedule between two queries delays no row: neither one that the first query found, nor one
// announced by Wake, nor one without a wake-up.
func TestScheduledSweepDelaysNoRow(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		every, made, due time.Duration
		wake             bool
	}{
		"seen by the query":      {50 * time.Second, 0, 70 * time.Second, false},
		"woken after the query":  {50 * time.Second, 10 * time.Second, 70 * time.Second, true},
		"woken before the query": {50 * time.Second, 10 * time.Second, 55 * time.Second, true},
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

// The store's clock decides, even if this host's clock is wrong.
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

// With the default schedule a sweeper sweeps at its start, on the hour and half past, and at no other time.
func TestDefaultSchedule(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(7 * time.Minute) // the bubble starts at midnight
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

// Run works with a context that cannot be cancelled.
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

// leaving ends the goroutine of its caller at a set time: the only way to end a Run without a cancellation.
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

// twice is a schedule with two times.
type twice [2]time.Time

func (s twice) Next(t time.Time) time.Time {
	for _, at := range s {
		if at.After(t) {
			return at
		}
	}
	return time.Time{}
}

// A sweep of the schedule happens exactly on time, with or without due rows. After the schedule's end due rows still
// expire.
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

// A wake-up during a sweep of the schedule is not lost.
func TestWakeDuringAScheduledSweep(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		sw := newSweeper(t, w, expiry.SweeperConfig{Schedule: "@every 10m"}).Tune(expiry.Tuning{PollInterval: time.Hour})
		defer run(t, sw)()
		synctest.Wait()
		w.set(nil, 2*time.Second) // duration of a batch
		time.Sleep(10*time.Minute + time.Second)
		w.set(nil, 0)
		time.Sleep(900 * time.Millisecond)
		deadline := w.hold(t, "row", 5*time.Second) // the sweep's transaction may have started before
		w.Wake(deadline)
		time.Sleep(20 * time.Second)
		w.expiredWithin(t, "row", deadline, time.Second)
	})
}

func TestWake_queriesForEarlierDeadlines(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		sw := newSweeper(t, w, expiry.SweeperConfig{Schedule: "@never"})
		defer run(t, sw)()
		time.Sleep(time.Second)
		_, before := w.counts()
		for range 1000 {
			w.Wake(w.hold(t, "later", 15*time.Minute))
			time.Sleep(10 * time.Millisecond)
		}
		if _, queries := w.counts(); queries != before {
			t.Errorf("holds with later deadlines cost %d queries", queries-before)
		}
		first := w.hold(t, "first", 20*time.Second)
		w.Wake(first)
		time.Sleep(time.Second)
		for n := range 10 {
			w.Wake(w.hold(t, fmt.Sprint("behind ", n), 30*time.Second))
		}
		time.Sleep(time.Second)
		if _, queries := w.counts(); queries != before+1 {
			t.Errorf("the earliest deadline and later ones cost %d queries, want one", queries-before)
		}
		time.Sleep(40 * time.Second)
		w.expiredWithin(t, "first", first, time.Second)
		if left := len(w.table.Active()); left != 1 {
			t.Errorf("%d rows are left, want the one with the later deadline", left)
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
		if _, queries := w.counts(); queries > 12 {
			t.Errorf("1000 wakes in a second cost %d queries", queries)
		}
	})
}

// Each call of Run receives every Wake, even after the end of another Run.
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

// A wake-up from code that has reached the store ends the pause after a failure. It does not cause constant sweeps of
// a store that still fails.
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
		w.Wake(time.Now().Add(time.Second)) // a deadline does not show that the store works
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

// figure returns the sum of a counter, or the last value of another instrument.
func figure(t *testing.T, r *metrictest.Recorder, name string) float64 {
	t.Helper()
	values := r.Values("holdfast.expiry." + name + "{holdfast.sweeper=expiry}")
	if len(values) == 0 {
		t.Fatalf("%s was not recorded", name)
	}
	return values[len(values)-1]
}

func TestFigures(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var r metrictest.Recorder
		w := newWorld(t)
		w.ahead = -5 * time.Minute
		for _, id := range []string{"a", "b", "bad"} {
			w.hold(t, id, -20*time.Second)
		}
		w.hold(t, "later", time.Hour)
		w.store = w.emitting(t, func(_ context.Context, rows []expiry.Row) error {
			if has(rows, "bad") {
				return errors.New("bad row")
			}
			return nil
		})
		defer run(t, newSweeper(t, w, expiry.SweeperConfig{MeterProvider: &r}))()
		time.Sleep(10 * time.Second)
		want := map[string]float64{
			"claimed": 2, "expired": 2, "raced": 0, "poisoned": 1, "sweep.duration": 0, "lag": 20,
			"overdue": 1, "overdue.age": 20.1, "clock.skew": 300, "next": float64(time.Now().Add(80*time.Second).UnixMilli())/1000 + 0.1,
		}
		for _, name := range slices.Sorted(maps.Keys(want)) {
			if got := figure(t, &r, name); got-want[name] > 0.001 || want[name]-got > 0.001 {
				t.Errorf("%s is %.3f, want %.3f", name, got, want[name])
			}
		}
	})
}

// undated is a store in which some active rows have no deadline.
type undated struct {
	*world
	rows *atomic.Int64
}

func (u undated) Look(ctx context.Context, skip []string) (driver.Outlook, error) {
	o, err := u.world.Look(ctx, skip)
	o.Undated = int(u.rows.Load())
	return o, err
}

// logged counts the log lines that contain a text.
type logged struct {
	slog.Handler
	part string
	n    *atomic.Int64
}

func (l logged) Enabled(context.Context, slog.Level) bool { return true }

func (l logged) Handle(_ context.Context, r slog.Record) error {
	if strings.Contains(r.Message, l.part) {
		l.n.Add(1)
	}
	return nil
}

// Rows that lose their deadline are counted at every query, and logged once until there are none.
func TestRowsWithoutDeadlineAreReported(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var r metrictest.Recorder
		log := logged{slog.DiscardHandler, "without a deadline", new(atomic.Int64)}
		u := undated{newWorld(t), new(atomic.Int64)}
		sw, err := expiry.NewSweeper(u, expiry.SweeperConfig{MeterProvider: &r, Logger: slog.New(log)})
		must(t, err)
		defer run(t, sw)()
		for i, rows := range []int64{0, 3, 0, 2} {
			u.rows.Store(rows)
			time.Sleep(time.Hour)
			if got := figure(t, &r, "undated"); got != float64(rows) {
				t.Errorf("undated is %v, want %d", got, rows)
			}
			if got, want := log.n.Load(), int64(i+1)/2; got != want {
				t.Errorf("logged %d times, want %d", got, want)
			}
		}
	})
}
