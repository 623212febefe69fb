package txretry_test

import (
	"context"
	"errors"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/internal/metrictest"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/driver"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

var errConflict = &pgconn.PgError{Severity: "ERROR", Code: "40001", Message: "test"}

// budgeted is a manager on a fake whose budget is half of the attempts. Its calls have one attempt each by default, so
// that a test counts conflicts exactly.
type budgeted struct {
	*txretrytest.Manager
	t *testing.T
}

func newBudgeted(t *testing.T, meters *metrictest.Recorder) budgeted {
	cfg := txretry.Config{RetryBudget: 0.5, MaxAttempts: 1, Rand: func() float64 { return 0.5 }}
	if meters != nil {
		cfg.MeterProvider = meters
	}
	return budgeted{txretrytest.New(txretrytest.Config{Retry: cfg}), t}
}

// calls makes calls one after the other, each of which returns err.
func (b budgeted) calls(n int, err error) {
	b.t.Helper()
	for range n {
		ran := false
		got := b.Do(b.t.Context(), func(context.Context, pgx.Tx) error { ran = true; return err })
		if !ran || !errors.Is(got, err) {
			b.t.Fatalf("a call alone: ran %t, error %v", ran, got)
		}
	}
}

// refuses reports whether a call is refused while another one runs.
func (b budgeted) refuses() bool {
	b.t.Helper()
	var err error
	ran := false
	outer := b.Do(b.t.Context(), func(context.Context, pgx.Tx) error {
		inner := make(chan error)
		ctx, cancel := context.WithCancel(b.t.Context())
		defer cancel()
		go func() { inner <- b.Do(ctx, func(context.Context, pgx.Tx) error { ran = true; return nil }) }()
		synctest.Wait() // it is refused, or waits for the one transaction of the fake
		cancel()
		err = <-inner
		return errStop
	})
	if !errors.Is(outer, errStop) || ran {
		b.t.Fatalf("the outer call: %v; the inner call ran: %t", outer, ran)
	}
	if errors.Is(err, context.Canceled) {
		return false
	}
	wantRefused(b.t, err)
	return true
}

var errStop = errors.New("stop")

// wantRefused checks that a call was not started, and that its error is the one of exhausted attempts.
func wantRefused(t *testing.T, err error) {
	t.Helper()
	timeout, ok := errors.AsType[*txretry.LockTimeoutError](err)
	if !ok {
		t.Fatalf("error %v, want *LockTimeoutError", err)
	}
	if len(timeout.Attempts) != 0 || timeout.Code() != "LOCK_TIMEOUT" || timeout.HTTPStatus() != 503 || timeout.RetryAfter() != time.Second {
		t.Errorf("refused with %+v, %s, status %d, after %v", timeout, timeout.Code(), timeout.HTTPStatus(), timeout.RetryAfter())
	}
	if want := "txretry: not started: too many recent attempts needed a retry, and another call is running"; err.Error() != want {
		t.Errorf("error %q, want %q", err, want)
	}
}

func (b budgeted) wantRefuses(want bool, when string) {
	b.t.Helper()
	if got := b.refuses(); got != want {
		b.t.Errorf("%s: refuses %t, want %t", when, got, want)
	}
}

func TestBudget_refusesAboveItsShare(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBudgeted(t, nil)
		b.calls(9, errConflict)
		b.wantRefuses(false, "after 9 conflicts") // the outer call counts, too: 9 of 10
		b.calls(1, errConflict)
		b.wantRefuses(true, "after 10 conflicts of 11")
		b.calls(8, nil) // 10 of 20
		b.wantRefuses(false, "at the share")
		b.calls(2, errConflict) // 12 of 23
		b.wantRefuses(true, "above the share again")
	})
}

// Errors of the caller, lost connections and refused constraints say nothing about locks.
func TestBudget_countsOnlyConflicts(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBudgeted(t, nil)
		b.calls(20, errors.New("sold out"))
		b.calls(20, &pgconn.PgError{Code: "23505"})
		b.calls(20, &pgconn.PgError{Code: "57P01"})
		b.wantRefuses(false, "without a conflict")
		busy := &pgconn.PgError{Code: "55P03"}
		for range 80 {
			err := b.DoWith(t.Context(), txretry.Options{NoWait: true}, func(context.Context, pgx.Tx) error { return busy })
			if !errors.Is(err, busy) {
				t.Fatal(err)
			}
		}
		b.wantRefuses(false, "after 80 calls that do not wait for locks")
		b.calls(160, busy)
		b.wantRefuses(true, "after 160 lock timeouts")
	})
}

// The budget heals without successful calls: 10 s after the last conflict it is full again.
func TestBudget_healsWithTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBudgeted(t, nil)
		time.Sleep(500 * time.Millisecond)
		b.calls(20, errConflict)
		time.Sleep(9900 * time.Millisecond)
		b.wantRefuses(true, "after 9.9 s")
		time.Sleep(1100 * time.Millisecond)
		b.wantRefuses(false, "after 11 s")
		b.calls(9, errConflict)
		b.wantRefuses(false, "after 9 new conflicts")
		time.Sleep(time.Hour)
		b.calls(9, errConflict)
		b.wantRefuses(false, "after an hour and 9 conflicts")
		b.calls(1, errConflict)
		b.wantRefuses(true, "after an hour and 10 conflicts")
	})
}

// Calls that wait for a lock for 8 s have at most two conflicts in 10 s. They keep the budget exceeded nevertheless.
// The first that gets its lock ends this.
func TestBudget_staysExceededWithSlowProbes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBudgeted(t, nil)
		b.calls(10, errConflict)
		for range 20 {
			_ = b.Do(t.Context(), func(context.Context, pgx.Tx) error {
				time.Sleep(8 * time.Second)
				wantRefused(t, b.Do(t.Context(), func(context.Context, pgx.Tx) error { return nil }))
				return errConflict
			})
		}
		b.calls(2, nil)
		b.wantRefuses(false, "after two that got their locks")
	})
}

// A call that has started keeps its attempts over the budget, and commits. Another call may start only while it waits
// between two attempts.
func TestBudget_keepsStartedCalls(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBudgeted(t, nil)
		last, release, done := make(chan bool), make(chan bool), make(chan error)
		attempts := 0
		go func() {
			done <- b.DoWith(t.Context(), txretry.Options{MaxAttempts: 6}, func(context.Context, pgx.Tx) error {
				if attempts++; attempts < 6 {
					return errConflict
				}
				last <- true
				<-release
				return nil
			})
		}()
		synctest.Wait() // it waits before its second attempt
		b.calls(9, errConflict)
		b.wantRefuses(true, "after 10 conflicts")
		<-last
		refused := b.Do(t.Context(), func(context.Context, pgx.Tx) error { return nil })
		close(release)
		if err := <-done; err != nil || attempts != 6 {
			t.Errorf("the started call: %d attempts, %v", attempts, err)
		}
		wantRefused(t, refused)
	})
}

// A call that panics or exits its goroutine does not count as running for ever.
func TestBudget_survivesPanics(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBudgeted(t, nil)
		func() {
			defer func() { _ = recover() }()
			_ = b.Do(t.Context(), func(context.Context, pgx.Tx) error { panic("test") })
		}()
		b.calls(20, errConflict)
	})
}

func TestBudget_metrics(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var meters metrictest.Recorder
		b := newBudgeted(t, &meters)
		newBudgeted(t, &meters) // has no conflicts
		exceeded := func() float64 {
			t.Helper()
			seen, err := meters.Collect(t.Context())
			if err != nil || len(seen) != 1 {
				t.Fatalf("%v, %v", seen, err)
			}
			return seen["holdfast.txretry.budget.exceeded"]
		}
		if got := exceeded(); got != 0 {
			t.Errorf("%v budgets are exceeded at the start", got)
		}
		b.calls(12, errConflict)
		if got := exceeded(); got != 1 {
			t.Errorf("%v budgets are exceeded, want 1", got)
		}
		err := b.Do(t.Context(), func(context.Context, pgx.Tx) error {
			meters.Take()
			err := b.DoWith(t.Context(), txretry.Options{Name: "op"}, func(context.Context, pgx.Tx) error { return nil })
			if _, ok := errors.AsType[*txretry.LockTimeoutError](err); !ok {
				t.Errorf("not refused: %v", err)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		points := meters.Take()
		if got := points["holdfast.txretry.refused{operation=op}"]; !slices.Equal(got, []float64{1}) {
			t.Errorf("refused: %v", got)
		}
		for key := range points {
			if key == "holdfast.txretry.duration{operation=op,outcome=rolled_back}" || key == "holdfast.txretry.attempts{operation=op,outcome=rolled_back}" {
				t.Errorf("a refused call is in %s", key)
			}
		}
		time.Sleep(11 * time.Second)
		if got := exceeded(); got != 0 {
			t.Errorf("%v budgets are exceeded after 11 s", got)
		}
	})
}

func TestBudget_rejectsOtherShares(t *testing.T) {
	t.Parallel()
	for _, share := range []float64{-0.1, 1, 50, math.NaN()} {
		if _, err := txretry.NewOver(struct{ driver.Source }{}, txretry.Config{RetryBudget: share}); err == nil {
			t.Errorf("share %v is accepted", share)
		}
	}
}

// A table stays locked, and 20 callers make 3 calls each. The budget saves most attempts, and no commit is lost: after
// the lock is released, the row has the sum of the calls that succeeded. The lock is on the table, because a row's lock
// would pass from waiter to waiter as they time out, and the server may then report 57014 for one of them.
func TestBudget_lockTimeoutStorm(t *testing.T) {
	t.Parallel()
	storm := func(share float64) (attempts, refused int) {
		pool := newCounter(t)
		m := newManager(t, pool, txretry.Config{
			RetryBudget: share, LockTimeout: 10 * time.Millisecond, BaseDelay: time.Millisecond, MaxDelay: 5 * time.Millisecond, Logger: quiet,
		})
		lock, err := pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := lock.Exec(t.Context(), "lock table counter in access exclusive mode"); err != nil {
			t.Fatal(err)
		}
		c := hammer(t, m, 20, 3, addOne)
		if c.committed != 0 {
			t.Errorf("%d calls committed under the lock", c.committed)
		}
		if err := lock.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
		for range 30 { // one after the other: none is refused
			if err := m.Do(t.Context(), addOne); err != nil {
				t.Fatalf("after the storm: %v", err)
			}
		}
		wantCounter(t, pool, 30)
		return c.attempts, c.refused
	}
	without, _ := storm(0)
	with, refused := storm(0.5)
	t.Logf("%d attempts without a budget, %d with one, %d of 60 calls refused", without, with, refused)
	if without != 20*3*6 || refused == 0 || with >= without {
		t.Errorf("attempts %d without, %d with a budget, %d refused; want 360, fewer, some", without, with, refused)
	}
}

// Callers read and write one row. The budget saves attempts, and the row has the sum of the calls that succeeded.
func TestBudget_contentionOnOneRow(t *testing.T) {
	t.Parallel()
	increment := func(ctx context.Context, tx pgx.Tx) error {
		var n int
		if err := tx.QueryRow(ctx, "select n from counter where id = 1").Scan(&n); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, "update counter set n = $1 where id = 1", n+1)
		return err
	}
	contend := func(share float64) (c counts) {
		pool := newCounter(t)
		c = hammer(t, newManager(t, pool, txretry.Config{
			RetryBudget: share, BaseDelay: time.Millisecond, MaxDelay: 5 * time.Millisecond, Logger: quiet,
		}), 10, 15, increment)
		wantCounter(t, pool, c.committed)
		return c
	}
	without, with := contend(0), contend(0.3)
	t.Logf("without a budget %+v, with one %+v", without, with)
	if with.attempts >= without.attempts || with.committed == 0 || without.refused != 0 {
		t.Errorf("without a budget %+v, with one %+v", without, with)
	}
}

// counts are the results of many calls.
type counts struct{ attempts, committed, exhausted, refused int }

// hammer lets callers make calls at the same time, each one call after the other.
func hammer(t *testing.T, m *txretry.Manager, callers, calls int, fn func(ctx context.Context, tx pgx.Tx) error) counts {
	t.Helper()
	var attempts, committed, exhausted, refused atomic.Int64
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			for range calls {
				own := 0
				err := m.Do(soon(t), func(ctx context.Context, tx pgx.Tx) error {
					own++
					return fn(ctx, tx)
				})
				attempts.Add(int64(own))
				timeout, locked := errors.AsType[*txretry.LockTimeoutError](err)
				switch {
				case err == nil:
					committed.Add(1)
				case !locked:
					t.Error(err)
				case own != len(timeout.Attempts):
					t.Errorf("%d attempts, %d reported", own, len(timeout.Attempts))
				case own == 0:
					refused.Add(1)
				default:
					exhausted.Add(1)
				}
			}
		})
	}
	wg.Wait()
	return counts{int(attempts.Load()), int(committed.Load()), int(exhausted.Load()), int(refused.Load())}
}
