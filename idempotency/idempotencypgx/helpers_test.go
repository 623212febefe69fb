package idempotencypgx_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	pgxdriver "github.com/holdfast-go/holdfast/idempotency/idempotencypgx/driver"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/txretry"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// newPool returns a pool on a schema with the table.
func newPool(t *testing.T) *pgxpool.Pool {
	t.Helper()
	return migrated(t, pgtest.New(t))
}

// pooled is newPool behind PgBouncer.
func pooled(t *testing.T) *pgxpool.Pool {
	t.Helper()
	return migrated(t, pgtest.NewPooled(t))
}

func migrated(t *testing.T, pool *pgxpool.Pool) *pgxpool.Pool {
	t.Helper()
	must(t, newStore(t, pool, idempotencypgx.Config{}).Migrate(t.Context()))
	return pool
}

func newManager(t *testing.T, pool *pgxpool.Pool) *txretry.Manager {
	t.Helper()
	manager, err := txretry.New(pool, txretry.Config{})
	must(t, err)
	return manager
}

func newRecords(t *testing.T, pool *pgxpool.Pool) pgxdriver.Records {
	t.Helper()
	return idempotencypgx.NewRecords(pool)
}

// newStore returns a store with claims in rows, under a lease of 30 s unless cfg sets another one.
func newStore(t *testing.T, pool *pgxpool.Pool, cfg idempotencypgx.Config) *idempotencypgx.Store {
	t.Helper()
	if cfg.Lease == 0 {
		cfg.Lease = 30 * time.Second
	}
	return newAlone(t, pool, cfg)
}

// newAlone returns a store without gate and lease, unless cfg sets them.
func newAlone(t *testing.T, pool *pgxpool.Pool, cfg idempotencypgx.Config) *idempotencypgx.Store {
	t.Helper()
	store, err := idempotencypgx.New(newManager(t, pool), cfg)
	must(t, err)
	return store
}

func newClaim() driver.Claim {
	return driver.NewClaim(driver.Key(idempotency.NewKey()), driver.FingerprintOf())
}

// waiting returns nil if a backend waits for a transaction on this schema's table.
func waiting(t *testing.T, pool *pgxpool.Pool) error {
	t.Helper()
	var n int
	err := pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_locks w JOIN pg_locks r USING (pid)
		WHERE NOT w.granted AND w.locktype = 'transactionid'
		AND r.relation = to_regclass('holdfast_idempotency')`).Scan(&n)
	if err == nil && n == 0 {
		err = errors.New("nobody waits")
	}
	return err
}

// trips counts the round trips of a pool. Before a statement that contains text it calls before, if that is set.
type trips struct {
	n      atomic.Int32
	text   string
	before func()
}

func (c *trips) TraceQueryStart(ctx context.Context, _ *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	if strings.HasPrefix(q.SQL, "--") { // a ping of the pool
		return ctx
	}
	c.n.Add(1)
	if c.before != nil && strings.Contains(q.SQL, c.text) {
		c.before()
	}
	return ctx
}

func (c *trips) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	c.n.Add(1)
	return ctx
}

func (*trips) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
func (*trips) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {
}
func (*trips) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

// traced returns a pool like direct, and the counter of its round trips.
func traced(t *testing.T, direct *pgxpool.Pool) (*pgxpool.Pool, *trips) {
	t.Helper()
	counter, cfg := &trips{}, direct.Config()
	cfg.ConnConfig.Tracer = counter
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	must(t, err)
	t.Cleanup(pool.Close)
	return pool, counter
}

// effects returns a pool with the table of records and a table of effects, and a function that counts the effects
// with a name.
func effects(t *testing.T, pool *pgxpool.Pool) (*pgxpool.Pool, func(name string) int) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), `CREATE TABLE effects (name text NOT NULL)`); err != nil {
		t.Fatal(err)
	}
	return pool, func(name string) (n int) {
		if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM effects WHERE name = $1`, name).Scan(&n); err != nil {
			t.Error(err)
		}
		return n
	}
}

// effect returns work that answers with the number of its run.
func effect(name string) func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
	var runs atomic.Int32
	return func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		if _, err := tx.Exec(ctx, `INSERT INTO effects VALUES ($1)`, name); err != nil {
			return idempotency.Response{}, err
		}
		return idempotency.JSON(http.StatusCreated, fmt.Sprintf("run %d", runs.Add(1)))
	}
}

// protected returns a function that sends a request with a key and a body to work behind the middleware.
func protected(t *testing.T, store *idempotencypgx.Store, work func(context.Context, pgx.Tx, *http.Request) (idempotency.Response, error)) func(key idempotency.Key, body string) *httptest.ResponseRecorder {
	t.Helper()
	protect, err := idempotency.NewMiddleware(store, idempotency.UnsafeGlobalScope, idempotency.MiddlewareConfig{})
	must(t, err)
	h := protect(store.Handler(work))
	return func(key idempotency.Key, body string) *httptest.ResponseRecorder {
		r := httptest.NewRequest(http.MethodPost, "/", strings.NewReader(body))
		r.Header.Set(idempotency.Header, string(key))
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, r)
		return rec
	}
}

const goodKey = "a0eebc999c0b4ef8bb6d6bb9bd380a11"
