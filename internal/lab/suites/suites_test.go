// Package suites runs the packages against public suites that others wrote. It contains tests only. The suite of
// Watermill runs in modules/watermill, and interop tests the formats of others.
package suites_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"testing"
	"time"

	"github.com/cockroachdb/cockroach-go/v2/crdb"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/txretry"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// accounts is the framework of CockroachDB's suite: two balances, read and changed in transactions that in runs.
type accounts struct {
	t    *testing.T
	pool *pgxpool.Pool
	in   func(ctx context.Context, fn func(tx pgx.Tx) error) error
	exec func(ctx context.Context, tx pgx.Tx, sql string, args ...any) error
}

// Init implements crdb.WriteSkewTest. The suite ignores its error.
func (a accounts) Init(ctx context.Context) error {
	_, err := a.pool.Exec(ctx, `CREATE TABLE accounts (acct int PRIMARY KEY, balance int NOT NULL);
		INSERT INTO accounts VALUES (1, 100), (2, 100)`)
	if err != nil {
		a.t.Error(err)
	}
	return err
}

func (a accounts) ExecuteTx(ctx context.Context, fn func(tx any) error) error {
	return a.in(ctx, func(tx pgx.Tx) error { return fn(tx) })
}

func (a accounts) GetBalances(ctx context.Context, tx any) (first, second int, err error) {
	rows, err := tx.(pgx.Tx).Query(ctx, `SELECT balance FROM accounts ORDER BY acct`)
	if err != nil {
		return 0, 0, err
	}
	balances, err := pgx.CollectRows(rows, pgx.RowTo[int])
	if err == nil && len(balances) != 2 {
		err = fmt.Errorf("%d balances", len(balances))
	}
	if err != nil {
		return 0, 0, err
	}
	return balances[0], balances[1], nil
}

func (a accounts) UpdateBalance(ctx context.Context, tx any, acct, delta int) error {
	return a.exec(ctx, tx.(pgx.Tx), `UPDATE accounts SET balance = balance + $1 WHERE acct = $2`, delta, acct)
}

func execPgx(ctx context.Context, tx pgx.Tx, sql string, args ...any) error {
	_, err := tx.Exec(ctx, sql, args...)
	return err
}

// execAtCommit sends the statement with COMMIT.
func execAtCommit(ctx context.Context, tx pgx.Tx, sql string, args ...any) error {
	if !txretry.AtCommit(tx, sql, args...) {
		return execPgx(ctx, tx, sql, args...)
	}
	return nil
}

// CockroachDB's suite for packages that retry transactions: two transactions that would skew the balances both
// succeed, one of them after a retry, although fn wraps the errors.
func TestCockroach_writeSkew(t *testing.T) {
	t.Parallel()
	plain := func(pool *pgxpool.Pool) func(ctx context.Context, fn func(tx pgx.Tx) error) error {
		return func(ctx context.Context, fn func(tx pgx.Tx) error) error {
			return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.Serializable}, fn)
		}
	}
	managed := func(pool *pgxpool.Pool) func(ctx context.Context, fn func(tx pgx.Tx) error) error {
		m, err := txretry.New(pool, txretry.Config{Logger: slog.New(slog.DiscardHandler), BaseDelay: time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		return func(ctx context.Context, fn func(tx pgx.Tx) error) error {
			return m.Do(ctx, func(_ context.Context, tx pgx.Tx) error { return fn(tx) })
		}
	}
	for name, tt := range map[string]struct {
		in   func(pool *pgxpool.Pool) func(ctx context.Context, fn func(tx pgx.Tx) error) error
		exec func(ctx context.Context, tx pgx.Tx, sql string, args ...any) error
		good bool
	}{
		"txretry":                   {managed, execPgx, true},
		"txretry, at commit":        {managed, execAtCommit, true},
		"transaction without retry": {plain, execPgx, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t)
			err := crdb.ExecuteTxGenericTest(t.Context(), accounts{t, pool, tt.in(pool), tt.exec})
			if (err == nil) != tt.good {
				t.Errorf("the suite: %v", err)
			}
		})
	}
}
