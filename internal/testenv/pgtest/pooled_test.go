package pgtest_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// The ways to execute statements behind a PgBouncer in transaction mode, which may run each message
// outside a transaction on another connection. The guide to production has this table.
func TestStatementModesBehindPgBouncer(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "five pools behind PgBouncer")
	const exists, missing = "42P05", "26000"
	for mode, want := range map[pgx.QueryExecMode]struct{ alone, inTx []string }{
		pgx.QueryExecModeCacheStatement: {[]string{"", exists, missing}, []string{"", exists, missing}}, // "" from 1.24 on
		pgx.QueryExecModeDescribeExec:   {[]string{missing}, []string{""}},
		pgx.QueryExecModeCacheDescribe:  {[]string{""}, []string{""}},
		pgx.QueryExecModeExec:           {[]string{""}, []string{""}},
		pgx.QueryExecModeSimpleProtocol: {[]string{""}, []string{""}},
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Behind(t, pgtest.URL(t), mode)
			spread(t, pool)
			alone := firstCode(t, func() error { return ask(t.Context(), pool) })
			if !slices.Contains(want.alone, alone) {
				t.Errorf("outside of a transaction: SQLSTATE %q, want one of %q", alone, want.alone)
			}
			inTx := firstCode(t, func() error {
				return pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return ask(t.Context(), tx) })
			})
			if !slices.Contains(want.inTx, inTx) {
				t.Errorf("in a transaction: SQLSTATE %q, want one of %q", inTx, want.inTx)
			}
			works := alone == "" && inTx == ""
			if listed := slices.Contains(pgtest.PooledModes, mode); listed != works && mode != pgx.QueryExecModeCacheStatement {
				t.Errorf("works: %v, in PooledModes: %v", works, listed)
			}
		})
	}
}

// spread makes the pooler open three connections.
func spread(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	servers := map[int]bool{}
	for range 3 {
		tx, err := pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback(context.WithoutCancel(t.Context()))
		var pid int
		if err := tx.QueryRow(t.Context(), "SELECT pg_backend_pid()", pgx.QueryExecModeExec).Scan(&pid); err != nil {
			t.Fatal(err)
		}
		servers[pid] = true
	}
	if len(servers) != 3 {
		t.Fatalf("%d connections, want 3", len(servers))
	}
}

func ask(ctx context.Context, db interface {
	QueryRow(context.Context, string, ...any) pgx.Row
},
) error {
	var got int64
	if err := db.QueryRow(ctx, "SELECT $1::int8 + length($2)", int64(40), "ab").Scan(&got); err != nil {
		return err
	}
	if got != 42 {
		return fmt.Errorf("got %d", got)
	}
	return nil
}

// firstCode calls do often enough to reach every connection in every order, and returns the SQLSTATE of
// the first failure.
func firstCode(t *testing.T, do func() error) string {
	t.Helper()
	for range 30 {
		var pg *pgconn.PgError
		err := do()
		if errors.As(err, &pg) {
			return pg.Code
		}
		if err != nil {
			t.Error(err)
		}
	}
	return ""
}
