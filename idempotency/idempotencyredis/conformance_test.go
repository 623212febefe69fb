package idempotencyredis_test

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest/conformance"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

func newStore(t *testing.T, client redis.UniversalClient, cfg idempotencyredis.Config) *idempotencyredis.Store {
	t.Helper()
	store, err := idempotencyredis.NewStore(client, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return store
}

// backend gives each subtest the same database: keys are random.
func backend(t *testing.T) conformance.Backend {
	client := redistest.New(t)
	return conformance.Backend{New: func(t *testing.T) idempotency.Store {
		return newStore(t, client, idempotencyredis.Config{Lease: 2 * time.Second})
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
