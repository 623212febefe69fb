package idempotencypgx_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest/conformance"
	"github.com/holdfast-go/holdfast/internal/pgtest"
)

// newPool returns a pool on a schema that has the table.
func newPool(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.New(t)
	if err := idempotencypgx.Migrate(t.Context(), pool, idempotencypgx.SchemaConfig{}); err != nil {
		t.Fatal(err)
	}
	return pool
}

// backend gives each subtest the same table: keys are random.
func backend(t *testing.T) conformance.Backend {
	pool := newPool(t)
	return conformance.Backend{New: func(t *testing.T) idempotency.Store {
		store, err := idempotencypgx.NewStore(pool, idempotencypgx.Config{Lease: 2 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		return store
	}}
}

func TestStore(t *testing.T) {
	t.Parallel()
	conformance.TestStore(t, backend(t))
}

func TestMiddleware(t *testing.T) {
	t.Parallel()
	conformance.TestMiddleware(t, backend(t))
}
