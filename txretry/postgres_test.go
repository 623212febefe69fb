package txretry_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"net/url"
	"os"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest/conformance"
)

var _ txretry.Transactor = (*txretry.Manager)(nil)

func TestConformance(t *testing.T) {
	t.Parallel()
	conformance.Run(t, newBackend)
}

func TestConformanceBehindPgBouncer(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "a variant: all of it behind PgBouncer")
	conformance.Run(t, func(t *testing.T) conformance.Backend {
		t.Helper()
		direct := newCounter(t)
		return backendOn(t, pgtest.Behind(t, direct.Config().ConnString(), pgx.QueryExecModeExec))
	})
}

func newBackend(t *testing.T) conformance.Backend {
	t.Helper()
	b, _ := newBackendOn(t)
	return b
}

func newBackendOn(t *testing.T) (conformance.Backend, *pgxpool.Pool) {
	t.Helper()
	pool := newCounter(t)
	return backendOn(t, pool), pool
}

// backendOn wants a pool on a table of counters.
func backendOn(t *testing.T, pool *pgxpool.Pool) conformance.Backend {
	t.Helper()
	exec(t, pool, deferredFailure)
	return conformance.Backend{
		New:          func(cfg txretry.Config) txretry.Transactor { return newManager(t, pool, cfg) },
		Add:          add,
		Read:         func(ctx context.Context) (int, error) { return read(ctx, pool) },
		Fail:         fail,
		FailAtCommit: failAtCommit,
	}
}

// deferredFailure makes COMMIT fail with the SQLSTATE that was inserted.
const deferredFailure = `
	create table failure (sqlstate text);
	create function fail() returns trigger language plpgsql as $$ begin raise exception 'test' using errcode = new.sqlstate; end $$;
	create constraint trigger fail after insert on failure deferrable initially deferred for each row execute function fail()`

func failAtCommit(ctx context.Context, tx pgx.Tx, sqlstate string) error {
	_, err := tx.Exec(ctx, "insert into failure values ($1)", sqlstate)
	return err
}

// newCounter returns a pool with a table of ten counters. When the test ends, the
// pool must have its connections back and the server no transaction of it, or of
// another pool made from its ConnString.
func newCounter(t *testing.T) *pgxpool.Pool {
	t.Helper()
	name := "holdfast_" + rand.Text()
	pool := pgtest.Pool(t, withParam(t, pgtest.URL(t), "application_name", name), 10)
	exec(t, pool, "create table counter (id int primary key, n int not null); insert into counter select i, 0 from generate_series(1, 10) i")
	t.Cleanup(func() { checkSettled(t, pool, name) })
	return pool
}

func withParam(t *testing.T, rawURL, key, value string) string {
	t.Helper()
	u, err := url.Parse(rawURL)
	if err != nil {
		t.Fatal(err)
	}
	query := u.Query()
	query.Set(key, value)
	u.RawQuery = query.Encode()
	return u.String()
}

func checkSettled(t *testing.T, pool *pgxpool.Pool, name string) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	testenv.Eventually(t, func() error {
		if n := pool.Stat().AcquiredConns(); n != 0 {
			return fmt.Errorf("%d connections were not given back", n)
		}
		var open int
		err := pool.QueryRow(ctx, "select count(*) from pg_stat_activity where application_name = $1 and state like 'idle in%'", name).Scan(&open)
		if err == nil && open != 0 {
			err = fmt.Errorf("%d sessions are idle in a transaction", open)
		}
		return err
	})
}

func newManager(t *testing.T, pool *pgxpool.Pool, cfg txretry.Config) *txretry.Manager {
	t.Helper()
	m, err := txretry.New(pool, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func exec(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), sql, args...); err != nil {
		t.Fatal(err)
	}
}

func add(ctx context.Context, tx pgx.Tx, delta int) error {
	_, err := tx.Exec(ctx, "update counter set n = n + $1 where id = 1", delta)
	return err
}

func read(ctx context.Context, pool *pgxpool.Pool) (n int, err error) {
	err = pool.QueryRow(ctx, "select n from counter where id = 1").Scan(&n)
	return n, err
}

func fail(ctx context.Context, tx pgx.Tx, sqlstate string) error {
	_, err := tx.Exec(ctx, fmt.Sprintf("do $$ begin raise exception 'test' using errcode = '%s'; end $$", sqlstate))
	return err
}

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }
