package txretry_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

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

// The server closes the connection of an idle transaction. That leaves COMMIT
// without an answer, which the resolver finds.
func TestIdleTimeout(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	m := newManager(t, pool, txretry.Config{IdleTimeout: 50 * time.Millisecond, Resolver: txretry.XactStatus()})
	calls := 0
	err := m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		if calls++; calls == 1 {
			pid := tx.Conn().PgConn().PID()
			testenv.Eventually(t, testenv.Patience, func() error {
				var n int
				err := pool.QueryRow(ctx, "select count(*) from pg_stat_activity where pid = $1", pid).Scan(&n)
				if err == nil && n > 0 {
					err = errors.New("still there")
				}
				return err
			})
			return nil
		}
		return add(ctx, tx, 1)
	})
	if err != nil || calls != 2 {
		t.Errorf("error %v after %d calls", err, calls)
	}
	wantCounter(t, pool, 1)
}
