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

func TestCancelledInTheQueue(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	m := newManager(t, pool, txretry.Config{})
	opts := txretry.Options{SerialKey: "k"}
	err := m.DoWith(t.Context(), opts, func(ctx context.Context, tx pgx.Tx) error {
		soon, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		wantCancelled(t, m.DoWith(soon, opts, func(context.Context, pgx.Tx) error {
			t.Error("fn was run")
			return nil
		}))
		return add(ctx, tx, 1)
	})
	if err != nil {
		t.Error(err)
	}
	wantCounter(t, pool, 1)
}

func TestCancelledInAcquire(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, newCounter(t).Config().ConnString(), 1)
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	wantCancelled(t, newManager(t, pool, txretry.Config{}).Do(ctx, func(context.Context, pgx.Tx) error {
		t.Error("fn was run")
		return nil
	}))
}

func TestCancelledInBegin(t *testing.T) {
	t.Parallel()
	direct := newCounter(t)
	proxy := testenv.NewProxy(t, direct.Config().ConnString())
	pool := pgtest.Pool(t, proxy.URL(), 1)
	m := newManager(t, pool, txretry.Config{})
	work := func(ctx context.Context, tx pgx.Tx) error { return add(ctx, tx, 1) }
	if err := m.Do(t.Context(), work); err != nil {
		t.Fatal(err)
	}
	proxy.Pause()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	wantCancelled(t, m.Do(ctx, work))
	proxy.Resume()
	if err := m.Do(t.Context(), work); err != nil {
		t.Errorf("afterwards: %v", err)
	}
	wantCounter(t, direct, 2)
}

func TestCancelledInFn(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	wantCancelled(t, newManager(t, pool, txretry.Config{}).Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		if err := add(ctx, tx, 1); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, "select pg_sleep(60)")
		return err
	}))
	wantCounter(t, pool, 0)
}

// COMMIT goes on: a client that hangs up does not make its outcome unknown.
func TestCancelledInCommit(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	exec(t, pool, `create function dawdle() returns trigger language plpgsql as
			$$ begin perform pg_sleep(8); return null; end $$;
		create constraint trigger dawdle after update on counter deferrable initially deferred
			for each row execute function dawdle()`)
	pgtest.Idle(t, pool, 2) // so that who watches need not wait for a connection
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	committed := false
	err := newManager(t, pool, txretry.Config{CommitTimeout: time.Minute}).Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		txretry.AfterCommit(tx, func() { committed = ctx.Err() != nil })
		go cancelWhileCommitting(ctx, cancel, pool, tx.Conn().PgConn().PID())
		return add(ctx, tx, 1)
	})
	if err != nil || !committed {
		t.Errorf("error %v, committed under a cancelled context: %v", err, committed)
	}
	wantCounter(t, pool, 1)
}

func cancelWhileCommitting(ctx context.Context, cancel func(), pool *pgxpool.Pool, pid uint32) {
	for committing := false; !committing && ctx.Err() == nil; {
		_ = pool.QueryRow(ctx, "select wait_event = 'PgSleep' from pg_stat_activity where pid = $1 and query = 'commit'", pid).Scan(&committing)
	}
	cancel()
}

func TestCancelledInSleep(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	cfg := txretry.Config{BaseDelay: time.Hour, MaxDelay: time.Hour}
	cfg.Rand = func() float64 { // asked right before the delay
		if n := pool.Stat().AcquiredConns(); n != 0 {
			t.Errorf("%d connections are held before the delay", n)
		}
		time.AfterFunc(50*time.Millisecond, cancel)
		return 0
	}
	err := newManager(t, pool, cfg).Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		if err := add(ctx, tx, 1); err != nil {
			return err
		}
		return fail(ctx, tx, "40001")
	})
	wantCancelled(t, err)
	wantSQLSTATE(t, err, "40001")
	wantCounter(t, pool, 0)
}
