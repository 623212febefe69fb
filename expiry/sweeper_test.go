package expiry_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirytest"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// world is a table and a store on it that notes when each row expired.
type world struct {
	manager *txretrytest.Manager
	table   *expirytest.Table
	store   expiry.Store

	mu      sync.Mutex
	when    map[string]time.Time
	looks   int
	batches int
	fail    error         // what the store answers, if anything
	hang    time.Duration // how long a batch takes
	ahead   time.Duration // of the store's clock; set it before anything else
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{manager: txretrytest.NewManager(txretrytest.Config{}), table: expirytest.NewTable(), when: map[string]time.Time{}}
	store, err := expirytest.NewStore(w.manager, expirytest.Config{
		Active: w.table.Active,
		Expire: w.table.Expire,
		Now:    func() time.Time { return time.Now().Add(w.ahead) },
		Emit: func(_ context.Context, _ pgx.Tx, rows []expiry.Row) error {
			w.mu.Lock()
			defer w.mu.Unlock()
			for _, row := range rows {
				w.when[row.ID] = time.Now()
			}
			return nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	w.store = store
	return w
}

func (w *world) SweepBatch(ctx context.Context, req expiry.Request) (expiry.Batch, error) {
	w.mu.Lock()
	w.batches++
	fail, hang := w.fail, w.hang
	w.mu.Unlock()
	if hang > 0 {
		select {
		case <-time.After(hang):
		case <-ctx.Done():
			return expiry.Batch{}, ctx.Err()
		}
	}
	if fail != nil {
		return expiry.Batch{}, fail
	}
	return w.store.SweepBatch(ctx, req)
}

func (w *world) Look(ctx context.Context, skip []string) (expiry.Outlook, error) {
	w.mu.Lock()
	w.looks++
	fail := w.fail
	w.mu.Unlock()
	if fail != nil {
		return expiry.Outlook{}, fail
	}
	return w.store.Look(ctx, skip)
}

func (w *world) set(fail error, hang time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.fail, w.hang = fail, hang
}

func (w *world) counts() (batches, looks int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.batches, w.looks
}

func (w *world) hold(t *testing.T, id string, d time.Duration) time.Time {
	t.Helper()
	deadline := time.Now().Add(w.ahead + d)
	err := w.manager.Do(t.Context(), func(_ context.Context, tx pgx.Tx) error {
		return w.table.Put(tx, id, deadline, expirytest.Held)
	})
	if err != nil {
		t.Fatal(err)
	}
	return deadline
}

// expiredWithin fails unless the row expired after its deadline, and by how much.
func (w *world) expiredWithin(t *testing.T, id string, deadline time.Time, late time.Duration) {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	when, ok := w.when[id]
	if !ok || when.Before(deadline) || when.Sub(deadline) > late {
		t.Errorf("row %s with deadline %v expired at %v (%v)", id, deadline, when, ok)
	}
}

func newSweeper(t *testing.T, s expiry.Store, cfg expiry.SweeperConfig) *expiry.Sweeper {
	t.Helper()
	cfg.Logger = slog.New(slog.DiscardHandler)
	sw, err := expiry.NewSweeper(s, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return sw
}

// run starts Run and returns a function that stops it and checks its answer.
func run(t *testing.T, sw *expiry.Sweeper) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- sw.Run(ctx) }()
	return func() {
		t.Helper()
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run returned %v", err)
		}
	}
}

func TestShortHoldExpiresOnTimeWithTheHalfHourSchedule(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		before := w.hold(t, "before", 2*time.Second)
		overdue := w.hold(t, "overdue", -time.Hour)
		start := time.Now()
		sw := newSweeper(t, w, expiry.SweeperConfig{})
		stop := run(t, sw)
		defer stop()
		synctest.Wait()
		w.expiredWithin(t, "overdue", overdue, time.Hour+time.Since(start))

		time.Sleep(10 * time.Second)
		w.expiredWithin(t, "before", before, time.Second)

		woken := w.hold(t, "woken", 2*time.Second)
		sw.Wake(woken)
		time.Sleep(10 * time.Second)
		w.expiredWithin(t, "woken", woken, time.Second)

		foreign := w.hold(t, "foreign", 15*time.Minute) // made by another process: no Wake
		time.Sleep(16 * time.Minute)
		w.expiredWithin(t, "foreign", foreign, time.Second)
	})
}

func TestScheduleSweepsEvenIfTheStoreForesawNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		stop := run(t, newSweeper(t, w, expiry.SweeperConfig{Recheck: 24 * time.Hour}))
		defer stop()
		synctest.Wait()
		deadline := w.hold(t, "unseen", time.Second)
		time.Sleep(31 * time.Minute)
		w.expiredWithin(t, "unseen", deadline, 30*time.Minute)
	})
}

func TestIdleCostsOneQueryAMinute(t *testing.T) {
	t.Parallel()
	for name, schedule := range map[string]expiry.Schedule{"default": nil, "never": expiry.Never()} {
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
					sw.Wake(time.Now().Add(15 * time.Minute)) // a hold that has time
				}
				stop()
				batches, looks := w.counts()
				if looks-startLooks > 62 || batches-startBatches > 2 { // the schedule sweeps twice, and each sweep is followed by a look
					t.Errorf("an idle hour cost %d batches and %d looks", batches, looks)
				}
			})
		})
	}
}

// What comes in during the schedule's own sweep is not lost.
func TestWakeDuringAScheduledSweep(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		sw := newSweeper(t, w, expiry.SweeperConfig{Schedule: expiry.Every(10 * time.Minute), Recheck: time.Hour})
		stop := run(t, sw)
		defer stop()
		synctest.Wait()
		w.set(nil, 2*time.Second) // how long a batch takes
		time.Sleep(10*time.Minute + time.Second)
		w.set(nil, 0)
		time.Sleep(900 * time.Millisecond)
		deadline := w.hold(t, "row", 5*time.Second) // the sweep's transaction may have begun before it
		sw.Wake(deadline)
		time.Sleep(20 * time.Second)
		w.expiredWithin(t, "row", deadline, time.Second)
	})
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
				sw := newSweeper(t, w, expiry.SweeperConfig{Schedule: expiry.Every(tc.every)})
				stop := run(t, sw)
				defer stop()
				time.Sleep(tc.made)
				if tc.made > 0 {
					deadline = w.hold(t, "row", tc.due-tc.made)
				}
				if tc.wake {
					sw.Wake(deadline)
				}
				time.Sleep(5 * time.Minute)
				w.expiredWithin(t, "row", deadline, time.Second)
			})
		})
	}
}

func TestWakeLooksOnlyForWhatComesBeforeTheNextLook(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		sw := newSweeper(t, w, expiry.SweeperConfig{Schedule: expiry.Never()})
		stop := run(t, sw)
		defer stop()
		time.Sleep(time.Second)
		_, before := w.counts()
		for range 1000 {
			sw.Wake(w.hold(t, "later", 15*time.Minute))
			time.Sleep(10 * time.Millisecond)
		}
		if _, looks := w.counts(); looks != before {
			t.Errorf("holds that have time cost %d looks", looks-before)
		}
		first := w.hold(t, "first", 20*time.Second)
		sw.Wake(first)
		time.Sleep(time.Second)
		for n := range 10 {
			sw.Wake(w.hold(t, fmt.Sprint("behind ", n), 30*time.Second))
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

// The store's clock decides, however wrong this host's is.
func TestSkewedClock(t *testing.T) {
	t.Parallel()
	for _, skew := range []time.Duration{5 * time.Minute, -5 * time.Minute} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t)
			w.ahead = skew
			sw := newSweeper(t, w, expiry.SweeperConfig{})
			stop := run(t, sw)
			defer stop()
			synctest.Wait()
			real := time.Now()
			sw.Wake(w.hold(t, "row", 2*time.Second))
			time.Sleep(10 * time.Second)
			w.expiredWithin(t, "row", real.Add(2*time.Second), time.Second)
		})
	}
}

func TestWakesCoalesce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		sw := newSweeper(t, w, expiry.SweeperConfig{})
		stop := run(t, sw)
		synctest.Wait()
		for range 1000 {
			sw.Wake(time.Time{})
			time.Sleep(time.Millisecond)
		}
		stop()
		if _, looks := w.counts(); looks > 12 {
			t.Errorf("1000 wakes in a second cost %d looks", looks)
		}
	})
}

func TestOneSweepAtATime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
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
	_, err := expiry.NewSweeper(nil, expiry.SweeperConfig{BatchSize: -1, MinPause: -1, Recheck: -1, MaxQuarantine: -1})
	for _, want := range []string{"store", "BatchSize", "MinPause", "Recheck", "MaxQuarantine"} {
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
