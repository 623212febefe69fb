package main_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// pgxScan asks the test's schema for one row.
func pgxScan(ctx context.Context, s services, target any, sql string, args ...any) error {
	conn, err := pgx.Connect(ctx, s.databaseURL)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	return conn.QueryRow(ctx, sql, args...).Scan(target)
}

// hold runs a statement and keeps its locks until release is called.
func hold(t *testing.T, s services, sql string, args ...any) (holder *pgx.Conn, release func()) {
	t.Helper()
	ctx := t.Context()
	conn, err := pgx.Connect(ctx, s.databaseURL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(ctx)) })
	tx, err := conn.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(ctx, sql, args...); err != nil {
		t.Fatal(err)
	}
	return conn, func() {
		t.Helper()
		if err := tx.Rollback(ctx); err != nil {
			t.Fatal(err)
		}
	}
}

// awaitBlocked waits until n sessions wait for a lock of holder.
func awaitBlocked(t *testing.T, s services, holder *pgx.Conn, n int) {
	t.Helper()
	testenv.Eventually(t, func() error {
		var waiting int
		err := pgxScan(t.Context(), s, &waiting,
			"select count(*) from pg_stat_activity where $1::integer = any(pg_blocking_pids(pid))", holder.PgConn().PID())
		if err == nil && waiting < n {
			err = fmt.Errorf("%d wait for the lock, want %d", waiting, n)
		}
		return err
	})
}
