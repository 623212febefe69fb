package txretry_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry"
)

// wantCancelled checks that a call ended with its context, without effect.
func wantCancelled(t *testing.T, err error) {
	t.Helper()
	if !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v, want that of the context", err)
	}
	var unknown *txretry.CommitUnknownError
	if errors.As(err, &unknown) {
		t.Errorf("error %v, but nothing is unknown", err)
	}
}

// The context ends while the call waits for its key, for a connection, for the answer to BEGIN, or for one to fn: it has had
// no effect, and the connection is sound afterwards.
func TestCancelled(t *testing.T) {
	t.Parallel()
	notRun := func(context.Context, pgx.Tx) error { return errors.New("fn was run") }
	for name, test := range map[string]struct {
		disturb func(t *testing.T, pool *pgxpool.Pool, proxy *testenv.Proxy) (settle func())
		fn      func(ctx context.Context, tx pgx.Tx) error
	}{
		"in acquire": {func(t *testing.T, pool *pgxpool.Pool, _ *testenv.Proxy) func() {
			conn, err := pool.Acquire(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			return conn.Release
		}, notRun},
		"in BEGIN": {func(_ *testing.T, _ *pgxpool.Pool, proxy *testenv.Proxy) func() {
			proxy.Pause()
			return proxy.Resume
		}, notRun},
		"in fn": {func(*testing.T, *pgxpool.Pool, *testenv.Proxy) func() { return func() {} }, func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "select pg_sleep(60)")
			return err
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			direct, pool, proxy := behindProxy(t, 1, addOne)
			m := newManager(t, pool, txretry.Config{})
			settle := test.disturb(t, pool, proxy)
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			wantCancelled(t, m.Do(ctx, test.fn))
			settle()
			if err := m.Do(t.Context(), addOne); err != nil {
				t.Errorf("afterwards: %v", err)
			}
			wantCounter(t, direct, 2)
		})
	}
}

// heldCommit has each COMMIT that has touched the counter wait until release is called.
func heldCommit(t *testing.T, pool *pgxpool.Pool) (release func()) {
	t.Helper()
	const key = "hashtext(current_schema())"
	exec(t, pool, `create function dawdle() returns trigger language plpgsql as
			$$ begin perform pg_advisory_xact_lock(`+key+`); return null; end $$;
		create constraint trigger dawdle after update on counter deferrable initially deferred
			for each row execute function dawdle()`)
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	_, err = conn.Exec(t.Context(), "select pg_advisory_lock("+key+")")
	if err != nil {
		t.Fatal(err)
	}
	return func() {
		if _, err := conn.Exec(context.WithoutCancel(t.Context()), "select pg_advisory_unlock_all()"); err != nil {
			t.Error(err)
		}
		conn.Release()
	}
}

// whileCommitting waits until a COMMIT waits for release, and asks for a value of that session.
func whileCommitting(t *testing.T, pool *pgxpool.Pool, pid uint32, value string) {
	t.Helper()
	testenv.Eventually(t, func() error {
		var done bool
		err := pool.QueryRow(t.Context(), "select "+value+" from pg_stat_activity where pid = $1 and query = 'commit' and wait_event = 'advisory'", pid).Scan(&done)
		if err == nil && !done {
			err = errors.New("it is not so")
		}
		return err
	})
}

// COMMIT goes on: a client that hangs up does not make its outcome unknown.
func TestCancelledInCommit(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	release := heldCommit(t, pool)
	pgtest.Idle(t, pool, 2) // the goroutine below need not wait for a connection
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	committed := false
	opts := txretry.Options{CommitTimeout: time.Minute, LockTimeout: testenv.Patience}
	err := newManager(t, pool, txretry.Config{}).DoWith(ctx, opts, func(ctx context.Context, tx pgx.Tx) error {
		txretry.AfterCommit(tx, func() { committed = ctx.Err() != nil })
		pid := pidOf(t, tx)
		go func() {
			defer release()
			whileCommitting(t, pool, pid, "true")
			cancel()
		}()
		return add(ctx, tx, 1)
	})
	if err != nil || !committed {
		t.Errorf("error %v, committed under a cancelled context: %v", err, committed)
	}
	wantCounter(t, pool, 1)
}

// No connection is held while a call waits for its next attempt.
func TestConnectionsAreFreeBetweenAttempts(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	cfg, _ := observed()
	cfg.Rand = func() float64 { // asked right before the delay
		if n := pool.Stat().AcquiredConns(); n != 0 {
			t.Errorf("%d connections are held before the delay", n)
		}
		return 0
	}
	calls := 0
	err := newManager(t, pool, cfg).Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		if calls++; calls == 1 {
			return fail(ctx, tx, "40001")
		}
		return nil
	})
	if err != nil || calls != 2 {
		t.Errorf("error %v after %d calls", err, calls)
	}
}

// Where pgx takes several statements for one (simple protocol), their answers
// hide that of COMMIT: never is a commit called a rollback.
func TestAtCommitWithSeveralStatements(t *testing.T) {
	t.Parallel()
	inEveryMode(t, func(t *testing.T, m *txretry.Manager, pool *pgxpool.Pool) {
		err := m.Do(t.Context(), func(_ context.Context, tx pgx.Tx) error {
			txretry.AtCommit(tx, "update counter set n = 1 where id = 1; update counter set n = 2 where id = 2")
			return nil
		})
		var unknown *txretry.CommitUnknownError
		if !errors.As(err, &unknown) {
			checkNotApplied(t, pool)
		}
	})
}

func checkNotApplied(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	if n, err := read(context.WithoutCancel(t.Context()), pool); err != nil || n != 0 {
		t.Errorf("called rolled back, but the counter is %d (error %v)", n, err)
	}
}

// faultyTracer panics when COMMIT has been answered.
type faultyTracer struct{}

func (faultyTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	return context.WithValue(ctx, faultyTracer{}, data.SQL)
}

func (faultyTracer) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryEndData) {
	if ctx.Value(faultyTracer{}) == "commit" {
		panic("boom")
	}
}

// Code of the user may run inside COMMIT. If it panics, nobody can say what
// became of the transaction, and the connection keeps no deadline.
func TestPanicDuringCommit(t *testing.T) {
	t.Parallel()
	direct := newCounter(t)
	cfg := direct.Config()
	cfg.MaxConns = 1
	cfg.ConnConfig.Tracer = faultyTracer{}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	var s seen
	m := newManager(t, pool, txretry.Config{CommitTimeout: time.Second, TracerProvider: tracerProvider{s: &s}})
	func() {
		defer func() {
			if recover() != "boom" {
				t.Error("the panic did not come out of Do")
			}
		}()
		_ = m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			return add(ctx, tx, 1)
		})
	}()
	wantCounter(t, direct, 1)
	if got := s.span["outcome"]; got != "unknown" {
		t.Errorf("outcome %s, want unknown", got)
	}
	if _, err := pool.Exec(t.Context(), "select pg_sleep(1.2)"); err != nil {
		t.Errorf("the connection was given back with the deadline of COMMIT: %v", err)
	}
}
