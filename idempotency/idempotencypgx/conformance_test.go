package idempotencypgx_test

import (
	"context"
	"crypto/rand"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	pgxdriver "github.com/holdfast-go/holdfast/idempotency/idempotencypgx/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest/conformance"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// newPool returns a pool on a schema that has the table.
func newPool(t *testing.T) *pgxpool.Pool {
	t.Helper()
	return migrated(t, pgtest.New(t))
}

// pooled is newPool behind a PgBouncer.
func pooled(t *testing.T) *pgxpool.Pool {
	t.Helper()
	return migrated(t, pgtest.NewPooled(t))
}

func migrated(t *testing.T, pool *pgxpool.Pool) *pgxpool.Pool {
	t.Helper()
	must(t, newStore(t, pool, idempotencypgx.Config{}).Migrate(t.Context()))
	return pool
}

// backend gives the subtests one table: keys are random.
func backend(t *testing.T, pool *pgxpool.Pool) conformance.Backend {
	t.Helper()
	return conformance.Backend{
		New: func(t *testing.T) driver.Store { return newStore(t, pool, idempotencypgx.Config{}) },
		Pass: func(t *testing.T, key driver.Key, d time.Duration) {
			t.Helper()
			if _, err := pool.Exec(t.Context(), `UPDATE holdfast_idempotency
				SET lease_until = lease_until - $2::interval, expires_at = expires_at - $2::interval WHERE key = $1`, "claim:"+string(key), d); err != nil {
				t.Error(err)
			}
		},
	}
}

func TestStore(t *testing.T) {
	t.Parallel()
	conformance.TestStore(t, backend(t, newPool(t)))
}

func TestStoreBehindPgBouncer(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "the statements are those of TestStore; TestRivalsAlone goes through a PgBouncer with every change")
	conformance.TestStore(t, backend(t, pooled(t)))
}

// databases gives each subtest the same tables: keys are random.
func databases(t *testing.T) conformance.RecordsBackend {
	t.Helper()
	pool := newPool(t)
	if _, err := pool.Exec(t.Context(), `CREATE TABLE effects (name text NOT NULL)`); err != nil {
		t.Fatal(err)
	}
	return conformance.RecordsBackend{New: func(t *testing.T) conformance.Database {
		return conformance.Database{
			Transactor: newManager(t, pool),
			Records:    newRecords(t, pool),
			Add: func(ctx context.Context, tx pgx.Tx, name string) error {
				_, err := tx.Exec(ctx, `INSERT INTO effects VALUES ($1)`, name)
				return err
			},
			Count: func(t *testing.T, name string) (n int) {
				if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM effects WHERE name = $1`, name).Scan(&n); err != nil {
					t.Error(err)
				}
				return n
			},
		}
	}}
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

func TestRecords(t *testing.T) {
	t.Parallel()
	conformance.TestRecords(t, databases(t))
}

func TestDo(t *testing.T) {
	t.Parallel()
	conformance.TestDo(t, databases(t))
}

// The gate is on Redis, as in production.
func TestDoBehindRedis(t *testing.T) {
	t.Parallel()
	client, b := redistest.New(t), databases(t)
	tables := b.New
	b.New = func(t *testing.T) conformance.Database {
		db := tables(t)
		db.Gate = func(t *testing.T) driver.Store {
			gate, err := idempotencyredis.New(client, idempotencyredis.Config{Prefix: rand.Text()})
			must(t, err)
			return gate
		}
		return db
	}
	if os.Getenv(testenv.NightlyVar) == "1" {
		conformance.TestDo(t, b)
		return
	}
	conformance.TestGate(t, b)
}

// A SELECT would find nothing while the other transaction is committing.
func TestResolveWaitsForAnOpenTransaction(t *testing.T) {
	t.Parallel()
	for name, commit := range map[string]bool{"commits": true, "rolls back": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t)
			records := newRecords(t, pool)
			rec := pgxdriver.Record{Key: driver.Key(idempotency.NewKey()), Token: "t", Response: driver.Response{Status: 200}}
			tx, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.Serializable})
			must(t, err)
			defer func() { _ = tx.Rollback(context.Background()) }()
			if err := records.Insert(t.Context(), tx, rec); err != nil { // a raw tx: inserted at once
				t.Fatal(err)
			}

			type answer struct {
				found bool
				err   error
			}
			resolved := make(chan answer, 1)
			go func() {
				_, found, err := records.Resolve(t.Context(), rec.Key)
				resolved <- answer{found, err}
			}()
			testenv.Eventually(t, func() error { return waiting(t, pool) })
			select {
			case a := <-resolved:
				t.Fatalf("Resolve did not wait: %+v", a)
			default:
			}
			if commit {
				err = tx.Commit(t.Context())
			} else {
				err = tx.Rollback(t.Context())
			}
			if a := <-resolved; err != nil || a.err != nil || a.found != commit {
				t.Errorf("Resolve = %+v (end of transaction: %v); want found %v", a, err, commit)
			}
		})
	}
}

// waiting returns nil when a backend waits for a transaction of this schema's table.
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
