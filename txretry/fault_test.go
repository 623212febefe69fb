package txretry_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry"
)

func wantSQLSTATE(t *testing.T, err error, want string) {
	t.Helper()
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.Code != want {
		t.Errorf("error %v, want SQLSTATE %s in it", err, want)
	}
}

// pidOf asks the server: Conn of the handle would change what travels with COMMIT.
func pidOf(t *testing.T, tx pgx.Tx) (pid uint32) {
	t.Helper()
	if err := tx.QueryRow(t.Context(), "select pg_backend_pid()").Scan(&pid); err != nil {
		t.Error(err)
	}
	return pid
}

func wantUnknown(t *testing.T, err error) {
	t.Helper()
	var unknown *txretry.CommitUnknownError
	if !errors.As(err, &unknown) {
		t.Fatalf("error %v, want *CommitUnknownError", err)
	}
	if pgconn.SafeToRetry(err) {
		t.Error("an unknown commit is called safe to retry")
	}
}

func TestBackendTerminated(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		swallow bool
		check   func(t *testing.T, err error)
	}{
		"at a statement": {false, func(t *testing.T, err error) { wantSQLSTATE(t, err, "57P01") }},
		"before COMMIT": {true, func(t *testing.T, err error) {
			var unavailable *txretry.UnavailableError
			if !errors.As(err, &unavailable) { // else the test was so slow that it was found before COMMIT
				wantUnknown(t, err)
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newCounter(t)
			calls := 0
			err := newManager(t, pool, txretry.Config{MaxAttempts: 1}).Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
				calls++
				if err := add(ctx, tx, 1); err != nil {
					return err
				}
				pid := pidOf(t, tx)
				exec(t, pool, "select pg_terminate_backend($1, 5000)", pid)
				if test.swallow {
					return nil
				}
				return add(ctx, tx, 1)
			})
			test.check(t, err)
			if calls != 1 {
				t.Errorf("fn ran %d times, want once", calls)
			}
			wantCounter(t, pool, 0)
		})
	}
}

// A statement that lost the connection, its error swallowed, is known to be
// rolled back: COMMIT is not sent.
func TestConnectionLostBeforeCommit(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	err := newManager(t, pool, txretry.Config{}).Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "select pg_terminate_backend(pg_backend_pid())")
		wantSQLSTATE(t, err, "57P01")
		return nil
	})
	if !errors.Is(err, pgx.ErrTxCommitRollback) {
		t.Errorf("error %v, want one that is pgx.ErrTxCommitRollback", err)
	}
	wantSQLSTATE(t, err, "57P01")
}

func TestCommitReplyLost(t *testing.T) {
	t.Parallel()
	for name, atCommit := range map[string]bool{"alone": false, "with AtCommit": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			direct := newCounter(t)
			proxy := testenv.NewProxy(t, direct.Config().ConnString())
			pool := pgtest.Pool(t, proxy.URL(), 2)
			m := newManager(t, pool, txretry.Config{CommitTimeout: time.Minute})
			m.SetWaits(time.Minute, time.Minute) // a BEGIN that is sent again has nothing prepared
			work := func(ctx context.Context, tx pgx.Tx) error {
				if atCommit {
					txretry.AtCommit(tx, "update counter set n = n + $1 where id = 1", 1)
					return nil
				}
				return add(ctx, tx, 1)
			}
			// Statements are prepared by a first round, so that the second is one trip.
			if err := m.Do(t.Context(), work); err != nil {
				t.Fatal(err)
			}
			go func() {
				for n := 0; n < 2 && t.Context().Err() == nil; {
					n, _ = read(t.Context(), direct)
				}
				proxy.Cut()
			}()
			calls := 0
			err := m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
				calls++
				txretry.AfterCommit(tx, func() { t.Error("AfterCommit ran without an answer") })
				defer proxy.DropReplies()
				return work(ctx, tx)
			})
			wantUnknown(t, err)
			if calls != 1 {
				t.Errorf("fn ran %d times, want once", calls)
			}
			eventuallyCounter(t, direct, 2)
		})
	}
}

func TestFnEndsTheTransaction(t *testing.T) {
	t.Parallel()
	for _, sql := range []string{"commit", "rollback"} {
		t.Run(sql, func(t *testing.T) {
			t.Parallel()
			pool := newCounter(t)
			calls := 0
			err := newManager(t, pool, txretry.Config{}).Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
				calls++
				txretry.AfterCommit(tx, func() { t.Error("AfterCommit ran") })
				if _, err := tx.Exec(ctx, sql); err != nil {
					return err
				}
				return &pgconn.PgError{Code: "40001"}
			})
			if !errors.Is(err, txretry.ErrManaged) || calls != 1 {
				t.Errorf("error %v after %d calls, want ErrManaged after one", err, calls)
			}
		})
	}
}

// Nobody knows what fn's own statement has done, so no function runs.
func TestFnEndsTheTransactionAndPanics(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	var s seen
	m := newManager(t, pool, txretry.Config{TracerProvider: tracerProvider{s: &s}})
	func() {
		defer func() { _ = recover() }()
		_ = m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			txretry.AfterCommit(tx, func() { t.Error("AfterCommit ran") })
			_, _ = tx.Exec(ctx, "commit")
			panic("boom")
		})
	}()
	if got := s.span["outcome"]; got != "unknown" {
		t.Errorf("outcome %s", got)
	}
}

func TestRowsLeftOpen(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	err := newManager(t, pool, txretry.Config{}).Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		if err := add(ctx, tx, 1); err != nil {
			return err
		}
		_, err := tx.Query(ctx, "select generate_series(1, 100000)")
		return err
	})
	if !errors.Is(err, pgx.ErrTxCommitRollback) {
		t.Errorf("error %v, want one that is pgx.ErrTxCommitRollback", err)
	}
	wantCounter(t, pool, 0)
}

// gone waits until the server has ended a session.
func gone(t *testing.T, pool *pgxpool.Pool, pid uint32) {
	t.Helper()
	testenv.Eventually(t, func() error {
		var n int
		err := pool.QueryRow(t.Context(), "select count(*) from pg_stat_activity where pid = $1", pid).Scan(&n)
		if err == nil && n > 0 {
			err = errors.New("still there")
		}
		return err
	})
}

// The server closes the connection of a transaction in which fn does nothing. That is an answer,
// if fn has taken long: COMMIT is not sent.
func TestIdleTimeout(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	m := newManager(t, pool, txretry.Config{IdleTimeout: 50 * time.Millisecond})
	calls := 0
	err := m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		calls++
		late := time.After(1100 * time.Millisecond)
		gone(t, pool, pidOf(t, tx))
		<-late
		return nil
	})
	wantSQLSTATE(t, err, "25P03")
	if calls != 1 {
		t.Errorf("fn ran %d times", calls)
	}
}

// A connection that was lost while fn did something else is found before COMMIT, so that nothing is
// unknown and the transaction can be repeated.
func TestConnectionLostWhileIdle(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	m := newManager(t, pool, txretry.Config{})
	calls := 0
	err := m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		if calls++; calls > 1 {
			return add(ctx, tx, 1)
		}
		late := time.After(1100 * time.Millisecond)
		exec(t, pool, "select pg_terminate_backend($1, 5000)", pidOf(t, tx))
		<-late
		return nil
	})
	if err != nil || calls != 2 {
		t.Errorf("error %v after %d calls", err, calls)
	}
	wantCounter(t, pool, 1)
}
