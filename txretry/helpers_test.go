package txretry_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"path"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/txretry"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// newCounter returns a pool with a table of ten counters. At the end of the test, all connections of the pool must be
// released. The server must have no open transaction of this pool, or of another pool made from its ConnString.
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
			return fmt.Errorf("%d connections were not released", n)
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

func addOne(ctx context.Context, tx pgx.Tx) error { return add(ctx, tx, 1) }

func openPool(t *testing.T, cfg *pgxpool.Config) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// behindProxy returns a counter, and a pool that reaches it through a proxy. Its connections are open, and have
// prepared the statements of work.
func behindProxy(t *testing.T, conns int, work func(ctx context.Context, tx pgx.Tx) error) (direct, pool *pgxpool.Pool, proxy *testenv.Proxy) {
	t.Helper()
	direct = newCounter(t)
	proxy = testenv.NewProxy(t, direct.Config().ConnString())
	pool = pgtest.Pool(t, proxy.URL(), int32(conns))
	var held []*pgxpool.Conn
	for range conns {
		conn, err := pool.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, conn)
		if err := pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error { return work(t.Context(), tx) }); err != nil {
			t.Fatal(err)
		}
	}
	for _, conn := range held {
		conn.Release()
	}
	return direct, pool, proxy
}

var quiet = slog.New(slog.DiscardHandler)

// soon returns a context that detects a hanging call.
func soon(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	t.Cleanup(cancel)
	return ctx
}

// observed returns a configuration with short delays, and a recorder of the retries.
func observed() (txretry.Config, *recorder) {
	r := &recorder{}
	return txretry.Config{BaseDelay: time.Millisecond, MaxDelay: 5 * time.Millisecond, Logger: slog.New(r)}, r
}

// recorder is a log that keeps the retried attempts.
type recorder struct {
	mu      sync.Mutex
	retries []map[string]string
}

func (r *recorder) Enabled(context.Context, slog.Level) bool { return true }
func (r *recorder) WithAttrs([]slog.Attr) slog.Handler       { return r }
func (r *recorder) WithGroup(string) slog.Handler            { return r }

func (r *recorder) Handle(_ context.Context, record slog.Record) error {
	if record.Message != "txretry: retrying transaction" {
		return nil
	}
	retry := map[string]string{}
	record.Attrs(func(a slog.Attr) bool {
		retry[a.Key] = a.Value.String()
		return true
	})
	r.mu.Lock()
	defer r.mu.Unlock()
	r.retries = append(r.retries, retry)
	return nil
}

// want checks that there was exactly one retry.
func (r *recorder) want(t *testing.T, sqlstate, phase string) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.retries) != 1 {
		t.Fatalf("%d retries, want 1: %v", len(r.retries), r.retries)
	}
	if a := r.retries[0]; a["sqlstate"] != sqlstate || a["phase"] != phase || a["attempt"] != "1" {
		t.Errorf("retried: %v, want %s in %s", a, sqlstate, phase)
	}
}

func wantCounter(t *testing.T, pool *pgxpool.Pool, want int) {
	t.Helper()
	got, err := read(context.WithoutCancel(t.Context()), pool)
	if err != nil {
		t.Fatal(err)
	}
	if got != want {
		t.Errorf("counter is %d, want %d", got, want)
	}
}

// eventuallyCounter waits for a COMMIT that is still running after its caller has left.
func eventuallyCounter(t *testing.T, pool *pgxpool.Pool, want int) {
	t.Helper()
	testenv.Eventually(t, func() error {
		got, err := read(t.Context(), pool)
		if err == nil && got != want {
			err = fmt.Errorf("counter is %d, want %d", got, want)
		}
		return err
	})
}

// inEveryMode runs a test with each way in which pgx can execute a batch.
func inEveryMode(t *testing.T, test func(t *testing.T, m *txretry.Manager, pool *pgxpool.Pool)) {
	t.Helper()
	pgtest.InEveryMode(t, func(t *testing.T, inMode func(*pgxpool.Pool) *pgxpool.Pool) {
		if strings.HasPrefix(path.Base(t.Name()), "PgBouncer") {
			testenv.Nightly(t, "a variant")
		}
		pool := newCounter(t)
		observed, _ := observed()
		test(t, newManager(t, inMode(pool), observed), pool)
	})
}

const addSQL = "update counter set n = n + $1 where id = 1"

func wantSQLSTATE(t *testing.T, err error, want string) {
	t.Helper()
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.Code != want {
		t.Errorf("error %v, want SQLSTATE %s in it", err, want)
	}
}

func wantUnknown(t *testing.T, err error) {
	t.Helper()
	var unknown *txretry.CommitUnknownError
	if !errors.As(err, &unknown) {
		t.Fatalf("error %v, want *CommitUnknownError", err)
	}
	if pgconn.SafeToRetry(err) {
		t.Error("an unknown commit is reported as safe to retry")
	}
}

// pidOf runs a query, because Conn of the handle would end the deferral to COMMIT.
func pidOf(t *testing.T, tx pgx.Tx) (pid uint32) {
	t.Helper()
	if err := tx.QueryRow(t.Context(), "select pg_backend_pid()").Scan(&pid); err != nil {
		t.Error(err)
	}
	return pid
}

func wantUnavailable(t *testing.T, err error, phase string) {
	t.Helper()
	var unavailable *txretry.UnavailableError
	if !errors.As(err, &unavailable) || unavailable.Phase != phase {
		t.Fatalf("error %v, want *UnavailableError of phase %s", err, phase)
	}
	if unavailable.HTTPStatus() != http.StatusServiceUnavailable || unavailable.Code() != "DATABASE_UNAVAILABLE" || unavailable.RetryAfter() != time.Second {
		t.Errorf("maps to %d %s after %v", unavailable.HTTPStatus(), unavailable.Code(), unavailable.RetryAfter())
	}
}
