package txretry_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry"
)

// The server may be too old for transaction_timeout: then nothing runs.
func TestTransactionTimeout(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	var major int
	if err := pool.QueryRow(t.Context(), "select current_setting('server_version_num')::int / 10000").Scan(&major); err != nil {
		t.Fatal(err)
	}
	var got string
	err := newManager(t, pool, txretry.Config{TransactionTimeout: time.Minute}).Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		return tx.QueryRow(ctx, "show transaction_timeout").Scan(&got)
	})
	if major >= 17 {
		if err != nil || got != "1min" {
			t.Errorf("transaction_timeout is %q, error %v", got, err)
		}
	} else if err == nil || !strings.Contains(err.Error(), "TransactionTimeout needs Postgres 17") {
		t.Errorf("error %v on version %d", err, major)
	}
	if n := pool.Stat().NewConnsCount(); n > 1 {
		t.Errorf("%d connections were opened: the failure cost one", n)
	}
}

// The wait for a lock ends in time for the rest of the attempt.
func TestLockTimeoutWithinDeadline(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	m := newManager(t, pool, txretry.Config{DeadlineMargin: 30 * time.Second})
	for deadline, want := range map[time.Duration][2]time.Duration{
		time.Hour:        {8 * time.Second, 8 * time.Second},
		36 * time.Second: {time.Millisecond, 6 * time.Second},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), deadline)
		defer cancel()
		var ms int
		err := m.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
			return tx.QueryRow(ctx, "select setting::int from pg_settings where name = 'lock_timeout'").Scan(&ms)
		})
		if got := time.Duration(ms) * time.Millisecond; err != nil || got < want[0] || got > want[1] {
			t.Errorf("%v before the deadline: lock_timeout is %v, error %v, want %v", deadline, got, err, want)
		}
	}
}

// gone waits until the server has ended a session.
func gone(t *testing.T, pool *pgxpool.Pool, pid uint32) {
	t.Helper()
	testenv.Eventually(t, testenv.Patience, func() error {
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

// A transaction whose client has vanished from the network gives up its locks.
func TestGhostGivesUpItsLocks(t *testing.T) {
	t.Parallel()
	direct, pool, proxy := behindProxy(t, 1, addOne)
	cut := newManager(t, pool, txretry.Config{IdleTimeout: 3 * time.Second, StatementTimeout: time.Second, Logger: quiet})
	err := cut.Do(soon(t), func(ctx context.Context, tx pgx.Tx) error {
		if err := add(ctx, tx, 1); err != nil {
			return err
		}
		proxy.SilenceConnections()
		return add(ctx, tx, 1)
	})
	wantUnavailable(t, err, txretry.PhaseFn)
	if err := newManager(t, direct, txretry.Config{}).Do(soon(t), addOne); err != nil {
		t.Errorf("who wants the same row: %v", err)
	}
	wantCounter(t, direct, 2)
}
