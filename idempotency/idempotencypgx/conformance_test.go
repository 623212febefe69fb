package idempotencypgx_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest/conformance"
	"github.com/holdfast-go/holdfast/internal/pgtest"
)

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
	if err := newStore(t, pool, idempotencypgx.Config{}).Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	return pool
}

// backend gives each subtest one of two tables: keys are random. The tests that
// wait for leases do not share a pool with those that crowd it.
func backend(t *testing.T, newPool func(*testing.T) *pgxpool.Pool) conformance.Backend {
	t.Helper()
	stores := func(cfg idempotencypgx.Config) func(*testing.T) driver.Store {
		pool := newPool(t)
		return func(t *testing.T) driver.Store { return newStore(t, pool, cfg) }
	}
	return conformance.Backend{
		New:   stores(idempotencypgx.Config{}),
		Brief: stores(idempotencypgx.Config{Lease: 12 * time.Second}),
		Fading: func(t *testing.T) (driver.Store, time.Duration) {
			cfg := idempotencypgx.Config{Lease: 5 * time.Second, Retention: 5 * time.Second}
			return stores(cfg)(t), cfg.Retention
		},
	}
}

func TestStore(t *testing.T) {
	t.Parallel()
	conformance.TestStore(t, backend(t, newPool))
}

func TestStoreBehindPgBouncer(t *testing.T) {
	t.Parallel()
	conformance.TestStore(t, backend(t, pooled))
}

func TestMiddleware(t *testing.T) {
	t.Parallel()
	conformance.TestMiddleware(t, backend(t, newPool))
}
