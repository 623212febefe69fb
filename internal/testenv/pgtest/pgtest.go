// Package pgtest gives each test its own schema on the shared Postgres.
package pgtest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

const (
	maxConns = 10
	patience = testenv.Patience
)

// New returns a pool of at most 10 connections whose search_path is a new, empty schema. When the test ends, the pool is
// closed and the schema dropped. A connection that was not returned to the pool, or an open transaction, fails the test.
func New(t testing.TB) *pgxpool.Pool {
	t.Helper()
	return Pool(t, URL(t), maxConns)
}

// NewOn is New on the server at this address.
func NewOn(t testing.TB, server string) *pgxpool.Pool {
	t.Helper()
	_, rawURL := newSchema(t, server)
	return Pool(t, rawURL, maxConns)
}

// NewSchema is New and also returns the schema's name. pool.Config().ConnString() is its URL.
func NewSchema(t testing.TB) (pool *pgxpool.Pool, schema string) {
	t.Helper()
	schema, rawURL := newSchema(t, testenv.PostgresURL(t))
	return Pool(t, rawURL, maxConns), schema
}

// URL creates a new, empty schema, which is dropped when the test ends. It returns an address whose connections have the
// schema as their search_path.
func URL(t testing.TB) string {
	t.Helper()
	_, rawURL := newSchema(t, testenv.PostgresURL(t))
	return rawURL
}

// Pool returns a pool on any address. It is closed when the test ends.
func Pool(t testing.TB, rawURL string, maxConns int32) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(rawURL)
	if err != nil {
		t.Fatal(err)
	}
	cfg.MaxConns = maxConns
	return open(t, cfg)
}

// Idle opens n connections of a pool and leaves them idle.
func Idle(t testing.TB, pool *pgxpool.Pool, n int) {
	t.Helper()
	var held []*pgxpool.Conn
	for range n {
		conn, err := pool.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, conn)
	}
	for _, conn := range held {
		conn.Release()
	}
}

func open(t testing.TB, cfg *pgxpool.Config) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closePool(t, pool) })
	return pool
}

// closePool closes the pool. Unlike Close, it does not wait forever for connections that are never returned.
func closePool(t testing.TB, pool *pgxpool.Pool) {
	t.Helper()
	closed := make(chan struct{})
	go func() {
		pool.Close()
		close(closed)
	}()
	select {
	case <-closed:
	case <-time.After(patience):
		t.Errorf("pgtest: %d connections were never returned to the pool", pool.Stat().AcquiredConns())
	}
}

func newSchema(t testing.TB, base string) (schema, rawURL string) {
	t.Helper()
	schema = "test_" + strings.ToLower(rand.Text()[:12])
	if err := exec(t, base, "CREATE SCHEMA "+schema); err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	t.Cleanup(func() { drop(t, base, schema) })
	rawURL, err := withSearchPath(base, schema)
	if err != nil {
		t.Fatal(err)
	}
	return schema, rawURL
}

// drop drops a schema. A process that the test has killed may still have a transaction on the server. If the two
// deadlock, drop tries again.
func drop(t testing.TB, base, schema string) {
	t.Helper()
	sql := "SET lock_timeout = '20s'; DROP SCHEMA " + schema + " CASCADE"
	for left := 10; ; left-- {
		err := exec(t, base, sql)
		if answer, ok := errors.AsType[*pgconn.PgError](err); ok && answer.Code == "40P01" && left > 0 {
			continue
		}
		if err != nil {
			t.Errorf("pgtest: %s: %v", sql, err)
		}
		return
	}
}

func exec(t testing.TB, rawURL, sql string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
	defer cancel()
	conn, err := pgx.Connect(ctx, rawURL)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	_, err = conn.PgConn().Exec(ctx, sql).ReadAll()
	return err
}

func withSearchPath(rawURL, schema string) (string, error) {
	u, err := url.Parse(rawURL)
	if err != nil || u.Scheme == "" {
		return "", fmt.Errorf("pgtest: the address of the server, as in %s, must be a URL: %w", testenv.PostgresVar, err)
	}
	query := u.Query()
	query.Set("search_path", schema)
	u.RawQuery = query.Encode()
	return u.String(), nil
}

// InEveryMode runs a test in parallel in each of pgx's ways to execute statements, and behind PgBouncer in transaction
// mode in those that work there. The test gets inMode, which returns a second pool with the address of a given pool, in
// that mode.
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

// PooledModes are the ways to execute statements that work behind any version of a pooler in transaction mode. They store
// nothing on the connection between two messages to the server.
var PooledModes = []pgx.QueryExecMode{pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol}

// NewPooled is New behind its own PgBouncer in transaction mode, in the mode QueryExecModeExec.
func NewPooled(t testing.TB) *pgxpool.Pool {
	t.Helper()
	return Behind(t, URL(t), pgx.QueryExecModeExec)
}

// Behind returns a pool that reaches the address through its own PgBouncer in transaction mode. extra are lines of the
// PgBouncer's configuration.
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
