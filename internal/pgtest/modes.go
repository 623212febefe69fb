package pgtest

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// InEveryMode runs a test in each of the ways in which pgx can execute statements, and in those that
// work there behind a PgBouncer in transaction mode, in parallel.
// The test gets inMode, which returns a second pool in that mode, on the address of a pool.
func InEveryMode(t *testing.T, test func(t *testing.T, inMode func(*pgxpool.Pool) *pgxpool.Pool)) {
	t.Helper()
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			test(t, func(pool *pgxpool.Pool) *pgxpool.Pool {
				cfg := pool.Config()
				cfg.ConnConfig.DefaultQueryExecMode = mode
				return open(t, cfg)
			})
		})
	}
	for _, mode := range PooledModes {
		t.Run("PgBouncer "+mode.String(), func(t *testing.T) {
			t.Parallel()
			test(t, func(pool *pgxpool.Pool) *pgxpool.Pool {
				return Behind(t, pool.Config().ConnString(), mode)
			})
		})
	}
}
