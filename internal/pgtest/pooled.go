package pgtest

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// PooledModes are the ways of executing statements that work behind a pooler in transaction mode of
// any version: they keep nothing on the connection between two messages to the server.
var PooledModes = []pgx.QueryExecMode{pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol}

// NewPooled is New behind a PgBouncer of its own in transaction mode, in the mode QueryExecModeExec.
func NewPooled(t testing.TB) *pgxpool.Pool {
	t.Helper()
	return Behind(t, URL(t), pgx.QueryExecModeExec)
}

// Behind returns a pool that reaches the address through a PgBouncer of its own in transaction mode.
// Extra are lines of its configuration.
func Behind(t testing.TB, rawURL string, mode pgx.QueryExecMode, extra ...string) *pgxpool.Pool {
	t.Helper()
	pooler := testenv.Private(t, testenv.PgBouncer, append([]string{rawURL}, extra...)...)
	cfg, err := pgxpool.ParseConfig(pooler.URL())
	if err != nil {
		t.Fatal(err)
	}
	cfg.MaxConns = maxConns
	cfg.ConnConfig.DefaultQueryExecMode = mode
	return open(t, cfg)
}
