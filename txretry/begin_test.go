package txretry_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry"
)

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
		gone(t, pool, tx.Conn().PgConn().PID())
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
		exec(t, pool, "select pg_terminate_backend($1, 5000)", tx.Conn().PgConn().PID())
		<-late
		return nil
	})
	if err != nil || calls != 2 {
		t.Errorf("error %v after %d calls", err, calls)
	}
	wantCounter(t, pool, 1)
}
