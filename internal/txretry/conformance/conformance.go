// Package conformance is the test suite for a txretry.Transactor. The manager on Postgres and the fake of txretrytest
// pass it.
package conformance

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/txretry"
)

// Backend is the data for the suite: a counter, starting at 0, that transactions change.
type Backend struct {
	// New returns a Transactor on the counter. It fails the test if cfg is invalid.
	New func(cfg txretry.Config) txretry.Transactor

	// Add adds to the counter in the transaction.
	Add func(ctx context.Context, tx pgx.Tx, delta int) error

	// Read returns the counter outside a transaction. It is called only when no transaction runs.
	Read func(ctx context.Context) (int, error)

	// Fail makes a statement of the transaction fail with this SQLSTATE and
	// returns its error.
	Fail func(ctx context.Context, tx pgx.Tx, sqlstate string) error

	// FailAtCommit makes COMMIT of the transaction fail with this SQLSTATE.
	FailAtCommit func(ctx context.Context, tx pgx.Tx, sqlstate string) error
}

// Run runs the suite. Each test runs in parallel on its own Backend.
func Run(t *testing.T, newBackend func(t *testing.T) Backend) {
	for name, test := range suite {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(&fixture{T: t, Backend: newBackend(t)})
		})
	}
}

// RunBubble is Run with each test in a testing/synctest bubble, for a Backend that uses only memory.
func RunBubble(t *testing.T, newBackend func(t *testing.T) Backend) {
	for name, test := range suite {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				test(&fixture{T: t, Backend: newBackend(t)})
			})
		})
	}
}

var suite = map[string]func(f *fixture){
	"commit":                          testCommit,
	"value":                           testValue,
	"business error":                  testBusinessError,
	"permanent SQLSTATE":              testPermanent,
	"database unavailable":            testOutOfOrder,
	"retry 40001":                     testRetry("40001"),
	"retry 40P01":                     testRetry("40P01"),
	"retry 55P03":                     testRetry("55P03"),
	"exhaustion":                      testExhaustion,
	"rejected COMMIT":                 testRefusedCommit,
	"masked error":                    testMasked,
	"swallowed permanent error":       testSwallowedPermanent,
	"savepoint rollback":              testSavepointRollback,
	"savepoint commit":                testSavepointCommit,
	"savepoint left open":             testSavepointLeftOpen,
	"savepoint nesting":               testSavepointNesting,
	"savepoint undoes a failure":      testSavepointHeals,
	"savepoint end cancelled":         testSavepointCancelled,
	"after commit":                    testAfterCommit,
	"after commit on foreign handles": testAfterCommitElsewhere,
	"handle is managed":               testManaged,
	"stale handle":                    testStale,
	"nested Do":                       testNested,
	"panic":                           testNoReturn(boom, "boom"),
	"goexit":                          testNoReturn(runtime.Goexit, nil),
	"cancelled before":                testCancelledBefore,
	"cancelled inside fn":             testCancelledInside,
	"cancelled while waiting":         testCancelledWaiting,
	"deadline leaves no room":         testDeadline,
	"cause of the cancellation":       testCause,
	"read only":                       testReadOnly,
	"bad options":                     testBadOptions,
	"concurrent increments lose none": testConcurrent,
	"NoWait returns 55P03":            testNoWait,
	"constraint retried":              testConstraintRetried,
	"constraint persists":             testConstraintPersists,
	"nested savepoint":                testNestedSavepoint,
	"nested savepoint fails":          testNestedFails,
	"nested savepoint panics":         testNestedPanic,
	"nested savepoint is transient":   testNestedTransient,
	"nested savepoint rejected":       testNestedRefused,
	"serial turn ends before hooks":   testSerialTurn,
}

// errBusiness is a permanent error of fn.
var errBusiness = errors.New("business error")

// work is the type of fn.
type work = func(ctx context.Context, tx pgx.Tx) error

type fixture struct {
	*testing.T
	Backend
}

// quick is a configuration with short delays, for tests on real servers.
func quick() txretry.Config {
	return txretry.Config{BaseDelay: time.Millisecond, MaxDelay: 2 * time.Millisecond}
}

func (f *fixture) do(fn work) error {
	f.Helper()
	return f.New(quick()).Do(f.Context(), fn)
}

func (f *fixture) add(ctx context.Context, tx pgx.Tx, delta int) {
	f.Helper()
	if err := f.Add(ctx, tx, delta); err != nil {
		f.Errorf("Add(%d): %v", delta, err)
	}
}

// want checks the committed counter.
func (f *fixture) want(n int) {
	f.Helper()
	got, err := f.Read(f.Context())
	if err != nil {
		f.Fatal(err)
	}
	if got != n {
		f.Errorf("counter is %d, want %d", got, n)
	}
}

func (f *fixture) ok(err error) {
	f.Helper()
	if err != nil {
		f.Fatalf("unexpected error: %v", err)
	}
}

func (f *fixture) is(err, target error) {
	f.Helper()
	if !errors.Is(err, target) {
		f.Errorf("error %v, want one that is %v", err, target)
	}
}

func (f *fixture) sqlstate(err error, want string) {
	f.Helper()
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.Code != want {
		f.Errorf("error %v, want SQLSTATE %s in it", err, want)
	}
}

func (f *fixture) equal(what string, got, want any) {
	f.Helper()
	if got != want {
		f.Errorf("%s: got %v, want %v", what, got, want)
	}
}

func testCommit(f *fixture) {
	f.ok(f.do(func(ctx context.Context, tx pgx.Tx) error { return f.Add(ctx, tx, 2) }))
	f.ok(f.do(func(ctx context.Context, tx pgx.Tx) error { return f.Add(ctx, tx, 3) }))
	f.want(5)
}

func testValue(f *fixture) {
	m := f.New(quick())
	v, err := txretry.DoValue(f.Context(), m, func(ctx context.Context, tx pgx.Tx) (string, error) {
		return "v", f.Add(ctx, tx, 1)
	})
	f.ok(err)
	f.equal("value", v, "v")
	v, err = txretry.DoValue(f.Context(), m, func(context.Context, pgx.Tx) (string, error) {
		return "not this", errBusiness
	})
	f.is(err, errBusiness)
	f.equal("value of a failure", v, "")
	f.want(1)
}

func testReadOnly(f *fixture) {
	err := f.New(quick()).DoWith(f.Context(), txretry.Options{ReadOnly: true}, func(ctx context.Context, tx pgx.Tx) error {
		return f.Add(ctx, tx, 1)
	})
	f.sqlstate(err, "25006")
	f.want(0)
}

func testBadOptions(f *fixture) {
	m := f.New(quick())
	for _, opts := range []txretry.Options{
		{Isolation: "none; drop table t"},
		{MaxAttempts: -1},
		{LockTimeout: time.Microsecond},
		{LockTimeout: 1 << 62},
		{StatementTimeout: time.Microsecond},
		{IdleTimeout: time.Microsecond},
		{CommitTimeout: -1},
	} {
		err := m.DoWith(f.Context(), opts, func(context.Context, pgx.Tx) error {
			f.Errorf("%+v: fn was run", opts)
			return nil
		})
		if err == nil {
			f.Errorf("%+v: no error", opts)
		}
	}
	if err := m.Do(f.Context(), nil); err == nil {
		f.Error("nil fn: no error")
	}
}

func testConcurrent(f *fixture) {
	const workers, each = 8, 5
	cfg := quick()
	cfg.MaxAttempts, cfg.MaxDelay = 100, 20*time.Millisecond
	m := f.New(cfg)
	var failures atomic.Int32
	done := make(chan struct{})
	for range workers {
		go func() {
			defer func() { done <- struct{}{} }()
			for range each {
				if err := m.Do(f.Context(), func(ctx context.Context, tx pgx.Tx) error { return f.Add(ctx, tx, 1) }); err != nil {
					failures.Add(1)
				}
			}
		}()
	}
	for range workers {
		<-done
	}
	f.equal("failures", failures.Load(), int32(0))
	f.want(workers * each)
}

func testSavepointRollback(f *fixture) {
	var ran []string
	after := func(tx pgx.Tx, name string) { txretry.AfterCommit(tx, func() { ran = append(ran, name) }) }
	f.ok(f.do(func(ctx context.Context, tx pgx.Tx) error {
		f.add(ctx, tx, 1)
		after(tx, "before")
		sp, err := tx.Begin(ctx)
		f.ok(err)
		f.add(ctx, sp, 10)
		f.add(ctx, tx, 100) // on the outer handle, but inside the savepoint
		after(sp, "inside")
		after(tx, "inside, outer handle")
		f.ok(sp.Rollback(ctx))
		f.is(sp.Rollback(ctx), pgx.ErrTxClosed)
		f.is(f.Add(ctx, sp, 1), pgx.ErrTxClosed)
		f.add(ctx, tx, 1000)
		after(tx, "after")
		return nil
	}))
	f.want(1001)
	if want := []string{"before", "after"}; !slices.Equal(ran, want) {
		f.Errorf("functions run: %v, want %v", ran, want)
	}
}

func testSavepointCommit(f *fixture) {
	ran := 0
	f.ok(f.do(func(ctx context.Context, tx pgx.Tx) error {
		return pgx.BeginFunc(ctx, tx, func(sp pgx.Tx) error {
			txretry.AfterCommit(sp, func() { ran++ })
			return f.Add(ctx, sp, 1)
		})
	}))
	f.equal("functions run", ran, 1)
	f.want(1)
}

func testSavepointLeftOpen(f *fixture) {
	f.ok(f.do(func(ctx context.Context, tx pgx.Tx) error {
		sp, err := tx.Begin(ctx)
		f.ok(err)
		return f.Add(ctx, sp, 1)
	}))
	f.want(1)
}

func testSavepointNesting(f *fixture) {
	f.ok(f.do(func(ctx context.Context, tx pgx.Tx) error {
		outer, err := tx.Begin(ctx)
		f.ok(err)
		f.add(ctx, outer, 1)
		inner, err := outer.Begin(ctx)
		f.ok(err)
		f.add(ctx, inner, 10)
		f.ok(inner.Commit(ctx))
		gone, err := outer.Begin(ctx)
		f.ok(err)
		f.ok(outer.Rollback(ctx)) // also rolls back the committed and the open savepoint inside it
		f.is(gone.Commit(ctx), pgx.ErrTxClosed)
		f.equal("AfterCommit on a lost savepoint", txretry.AfterCommit(gone, func() {}), false)
		_, err = gone.Begin(ctx)
		f.is(err, pgx.ErrTxClosed)
		f.add(ctx, tx, 100)
		return nil
	}))
	f.want(100)
}

func testSavepointHeals(f *fixture) {
	calls := 0
	f.ok(f.do(func(ctx context.Context, tx pgx.Tx) error {
		calls++
		f.add(ctx, tx, 1)
		sp, err := tx.Begin(ctx)
		f.ok(err)
		f.sqlstate(f.Fail(ctx, sp, "55P03"), "55P03")
		f.sqlstate(f.Add(ctx, sp, 1), "25P02")
		f.ok(sp.Rollback(ctx))
		return nil
	}))
	f.equal("calls", calls, 1)
	f.want(1)
}

// A rollback that never reaches the server must not let its effects commit.
func testSavepointCancelled(f *fixture) {
	err := f.do(func(ctx context.Context, tx pgx.Tx) error {
		sp, err := tx.Begin(ctx)
		f.ok(err)
		f.add(ctx, sp, 1)
		cancelled, cancel := context.WithCancel(ctx)
		cancel()
		f.is(sp.Rollback(cancelled), context.Canceled)
		return nil
	})
	f.is(err, pgx.ErrTxCommitRollback)
	f.want(0)
}

func testAfterCommit(f *fixture) {
	calls := 0
	var ran []int
	f.ok(f.do(func(ctx context.Context, tx pgx.Tx) error {
		calls++
		for i := range 3 {
			f.equal("AfterCommit", txretry.AfterCommit(tx, func() {
				f.want(1) // already committed
				ran = append(ran, calls*10+i)
			}), true)
		}
		txretry.AfterCommit(tx, nil)
		f.add(ctx, tx, 1)
		if calls == 1 {
			return f.Fail(ctx, tx, "40001")
		}
		return nil
	}))
	if want := []int{20, 21, 22}; !slices.Equal(ran, want) {
		f.Errorf("functions run: %v, want %v", ran, want)
	}
	f.is(f.do(func(_ context.Context, tx pgx.Tx) error {
		txretry.AfterCommit(tx, func() { f.Error("run after a rollback") })
		return errBusiness
	}), errBusiness)
}

func testAfterCommitElsewhere(f *fixture) {
	f.equal("nil tx", txretry.AfterCommit(nil, func() {}), false)
	f.equal("nil tx, statement", txretry.AtCommit(nil, "select 1"), false)
	f.ok(f.do(func(_ context.Context, tx pgx.Tx) error {
		foreign := struct{ pgx.Tx }{tx}
		f.equal("wrapped tx", txretry.AfterCommit(foreign, func() {}), false)
		f.equal("wrapped tx, statement", txretry.AtCommit(foreign, "select 1"), false)
		txretry.AfterCommit(tx, func() {
			f.equal("committed tx", txretry.AfterCommit(tx, func() {}), false)
			f.equal("committed tx, statement", txretry.AtCommit(tx, "select 1"), false)
		})
		return nil
	}))
}

func testManaged(f *fixture) {
	f.ok(f.do(func(ctx context.Context, tx pgx.Tx) error {
		f.is(tx.Commit(ctx), txretry.ErrManaged)
		f.is(tx.Rollback(ctx), txretry.ErrManaged)
		return f.Add(ctx, tx, 1)
	}))
	f.want(1)
}

func testStale(f *fixture) {
	var outer, nested pgx.Tx
	f.ok(f.do(func(ctx context.Context, tx pgx.Tx) (err error) {
		outer = tx
		nested, err = tx.Begin(ctx)
		return err
	}))
	ctx := f.Context()
	for _, tx := range []pgx.Tx{outer, nested} {
		f.is(f.Add(ctx, tx, 1), pgx.ErrTxClosed)
		_, err := tx.Exec(ctx, "select 1")
		f.is(err, pgx.ErrTxClosed)
		rows, err := tx.Query(ctx, "select 1")
		f.is(err, pgx.ErrTxClosed)
		f.is(rows.Err(), pgx.ErrTxClosed)
		f.is(tx.QueryRow(ctx, "select 1").Scan(), pgx.ErrTxClosed)
		f.is(tx.SendBatch(ctx, &pgx.Batch{}).Close(), pgx.ErrTxClosed)
		_, err = tx.CopyFrom(ctx, pgx.Identifier{"t"}, []string{"c"}, pgx.CopyFromRows(nil))
		f.is(err, pgx.ErrTxClosed)
		_, err = tx.Prepare(ctx, "p", "select 1")
		f.is(err, pgx.ErrTxClosed)
		objects := tx.LargeObjects()
		_, err = objects.Create(ctx, 0)
		f.is(err, pgx.ErrTxClosed)
		_, err = tx.Begin(ctx)
		f.is(err, pgx.ErrTxClosed)
		f.is(tx.Commit(ctx), pgx.ErrTxClosed)
		f.is(tx.Rollback(ctx), pgx.ErrTxClosed)
		if tx.Conn() != nil {
			f.Error("a stale handle returns its connection")
		}
	}
	f.want(0)
}

func testNested(f *fixture) {
	m := f.New(quick())
	f.ok(m.Do(f.Context(), func(ctx context.Context, tx pgx.Tx) error {
		f.is(m.Do(ctx, func(context.Context, pgx.Tx) error {
			f.Error("nested fn was run")
			return nil
		}), txretry.ErrNested)
		txretry.AfterCommit(tx, func() {
			f.ok(m.Do(ctx, func(ctx context.Context, tx pgx.Tx) error { return f.Add(ctx, tx, 1) }))
		})
		return f.Add(ctx, tx, 1)
	}))
	f.want(2)
}

var inSavepoint = txretry.Options{Savepoint: true}

// nest runs inner as a nested call inside an outer call, and passes the error of inner to then.
func (f *fixture) nest(opts txretry.Options, inner work, then func(ctx context.Context, tx pgx.Tx, err error) error) error {
	m := f.New(quick())
	return m.Do(f.Context(), func(ctx context.Context, tx pgx.Tx) error {
		f.add(ctx, tx, 1)
		return then(ctx, tx, m.DoWith(ctx, opts, inner))
	})
}

func testNestedSavepoint(f *fixture) {
	var ran []string
	var stale pgx.Tx
	f.ok(f.nest(inSavepoint, func(ctx context.Context, tx pgx.Tx) error {
		stale = tx
		f.is(tx.Commit(ctx), txretry.ErrManaged)
		f.is(tx.Rollback(ctx), txretry.ErrManaged)
		txretry.AfterCommit(tx, func() { ran = append(ran, "inner") })
		return f.Add(ctx, tx, 10)
	}, func(ctx context.Context, tx pgx.Tx, err error) error {
		f.ok(err)
		f.equal("functions run before the outer commit", len(ran), 0)
		f.is(f.Add(ctx, stale, 1), pgx.ErrTxClosed)
		txretry.AfterCommit(tx, func() { ran = append(ran, "outer") })
		return f.Add(ctx, tx, 100)
	}))
	f.want(111)
	if want := []string{"inner", "outer"}; !slices.Equal(ran, want) {
		f.Errorf("functions run: %v, want %v", ran, want)
	}
}

func testNestedFails(f *fixture) {
	f.ok(f.nest(inSavepoint, func(ctx context.Context, tx pgx.Tx) error {
		f.add(ctx, tx, 10)
		txretry.AfterCommit(tx, func() { f.Error("function of a failed nested call was run") })
		return errBusiness
	}, func(ctx context.Context, tx pgx.Tx, err error) error {
		f.is(err, errBusiness)
		return f.Add(ctx, tx, 100)
	}))
	f.want(101)
	f.ok(f.nest(inSavepoint, func(ctx context.Context, tx pgx.Tx) error {
		_ = f.Fail(ctx, tx, "23505") // fn returns nil anyway
		return nil
	}, func(ctx context.Context, tx pgx.Tx, err error) error {
		f.is(err, pgx.ErrTxCommitRollback)
		f.sqlstate(err, "23505")
		return f.Add(ctx, tx, 1000)
	}))
	f.want(1102)
}

func testNestedPanic(f *fixture) {
	m := f.New(quick())
	f.ok(m.Do(f.Context(), func(ctx context.Context, tx pgx.Tx) error {
		func() {
			defer func() { f.equal("panic value", recover(), "boom") }()
			_ = m.DoWith(ctx, inSavepoint, func(ctx context.Context, tx pgx.Tx) error {
				f.add(ctx, tx, 10)
				panic("boom")
			})
		}()
		return f.Add(ctx, tx, 1)
	}))
	f.want(1)
}

func testNestedTransient(f *fixture) {
	calls := 0
	f.ok(f.nest(inSavepoint, func(ctx context.Context, tx pgx.Tx) error {
		calls++
		if calls < 3 {
			return f.Fail(ctx, tx, "40001")
		}
		return f.Add(ctx, tx, 10)
	}, func(_ context.Context, _ pgx.Tx, err error) error { return err }))
	f.equal("calls", calls, 3)
	f.want(11)
}

func testNestedRefused(f *fixture) {
	for name, opts := range map[string]txretry.Options{
		"stronger isolation": {Savepoint: true, Isolation: pgx.Serializable},
		"unknown isolation":  {Savepoint: true, Isolation: "chaos"},
		"negative attempts":  {Savepoint: true, MaxAttempts: -1},
		"read only":          {Savepoint: true, ReadOnly: true},
	} {
		m := f.New(quick())
		f.ok(m.DoWith(f.Context(), txretry.Options{Isolation: pgx.ReadCommitted}, func(ctx context.Context, tx pgx.Tx) error {
			if err := m.DoWith(ctx, opts, func(context.Context, pgx.Tx) error { return nil }); err == nil {
				f.Errorf("%s: no error", name)
			}
			f.is(m.Do(ctx, func(context.Context, pgx.Tx) error { return nil }), txretry.ErrNested)
			return m.DoWith(ctx, inSavepoint, func(ctx context.Context, tx pgx.Tx) error { return f.Add(ctx, tx, 1) })
		}))
	}
	f.want(4)
}
