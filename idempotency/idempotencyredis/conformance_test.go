package idempotencyredis_test

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest/conformance"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

func newStore(t *testing.T, client redis.UniversalClient, cfg idempotencyredis.Config) *idempotencyredis.Store {
	t.Helper()
	store, err := idempotencyredis.New(client, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return store
}

// backend gives each subtest the same database: keys are random. The tests that
// wait for leases do not share a client with those that crowd it.
func backend(t *testing.T) conformance.Backend {
	t.Helper()
	database := redistest.URL(t)
	stores := func(cfg idempotencyredis.Config) func(*testing.T) driver.Store {
		client := redistest.Client(t, database)
		return func(t *testing.T) driver.Store { return newStore(t, client, cfg) }
	}
	return conformance.Backend{
		New:   stores(idempotencyredis.Config{}),
		Brief: stores(idempotencyredis.Config{Lease: 12 * time.Second}),
		Fading: func(t *testing.T) (driver.Store, time.Duration) {
			cfg := idempotencyredis.Config{Lease: 5 * time.Second, Retention: 5 * time.Second}
			return stores(cfg)(t), cfg.Retention
		},
	}
}

func TestStore(t *testing.T) {
	t.Parallel()
	conformance.TestStore(t, backend(t))
}

func TestMiddleware(t *testing.T) {
	t.Parallel()
	conformance.TestMiddleware(t, backend(t))
}
