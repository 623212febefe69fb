// Package conformance is the suite of what a txretry.Transactor promises. The
// manager on Postgres and the fake of txretrytest pass it.
package conformance

import (
	"context"
	"errors"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/txretry"
)

// Backend is what the suite runs on: a counter, starting at 0, that
// transactions change.
type Backend struct {
	// New returns a Transactor on the counter. It fails the test if cfg is invalid.
	New func(cfg txretry.Config) txretry.Transactor

	// Add adds to the counter in the transaction.
	Add func(ctx context.Context, tx pgx.Tx, delta int) error

	// Read returns the counter outside a transaction. Only called when none runs.
	Read func(ctx context.Context) (int, error)

	// Fail makes a statement of the transaction fail with this SQLSTATE and
	// returns its error.
	Fail func(ctx context.Context, tx pgx.Tx, sqlstate string) error

	// FailAtCommit makes COMMIT of the transaction fail with this SQLSTATE.
	FailAtCommit func(ctx context.Context, tx pgx.Tx, sqlstate string) error
}

// Run runs the suite, each test in parallel on a Backend of its own.
func Run(t *testing.T, newBackend func(t *testing.T) Backend) {
	for name, test := range suite {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(&fixture{T: t, Backend: newBackend(t)})
		})
	}
}

// RunBubble is Run with each test in a testing/synctest bubble, for a Backend
// that uses nothing but memory.
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
	"database out of order":           testOutOfOrder,
	"retry 40001":                     testRetry("40001"),
	"retry 40P01":                     testRetry("40P01"),
	"retry 55P03":                     testRetry("55P03"),
	"exhaustion":                      testExhaustion,
	"refused COMMIT":                  testRefusedCommit,
	"masked error":                    testMasked,
	"swallowed permanent error":       testSwallowedPermanent,
	"savepoint rollback":              testSavepointRollback,
	"savepoint commit":                testSavepointCommit,
	"savepoint left open":             testSavepointLeftOpen,
	"savepoint nesting":               testSavepointNesting,
	"savepoint heals a failure":       testSavepointHeals,
	"savepoint end cancelled":         testSavepointCancelled,
	"after commit":                    testAfterCommit,
	"after commit elsewhere":          testAfterCommitElsewhere,
	"handle is managed":               testManaged,
	"stale handle":                    testStale,
	"nested Do":                       testNested,
	"panic":                           testNoReturn(boom, "boom"),
	"goexit":                          testNoReturn(runtime.Goexit, nil),
	"cancelled before":                testCancelledBefore,
	"cancelled inside fn":             testCancelledInside,
	"cancelled while waiting":         testCancelledWaiting,
	"deadline leaves no room":         testDeadline,
	"cause of the context's end":      testCause,
	"read only":                       testReadOnly,
	"bad options":                     testBadOptions,
	"concurrent increments lose none": testConcurrent,
	"lock not available is an answer": testNoWait,
	"constraint retried":              testConstraintRetried,
	"constraint persists":             testConstraintPersists,
	"nested savepoint":                testNestedSavepoint,
	"nested savepoint fails":          testNestedFails,
	"nested savepoint panics":         testNestedPanic,
	"nested savepoint is transient":   testNestedTransient,
	"nested savepoint refused":        testNestedRefused,
	"serial turn ends before hooks":   testSerialTurn,
}

// errBusiness is a permanent error of fn.
var errBusiness = errors.New("business error")

// work is the shape of fn.
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
