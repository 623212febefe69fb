package idempotencypgx_test

import (
	"context"
	"crypto/rand"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest/conformance"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
)

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
