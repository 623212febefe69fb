package suite

import (
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
	"github.com/holdfast-go/holdfast/txretry"
)

// Stores are what a suite runs on: memory, Redis and Postgres. Keys are random, so its tests
// share one database each. lease is that of Redis and Postgres.
func Stores(t *testing.T, lease time.Duration) map[string]driver.Store {
	t.Helper()
	redis, err := idempotencyredis.New(redistest.New(t), idempotencyredis.Config{Lease: lease})
	if err != nil {
		t.Fatal(err)
	}
	manager, err := txretry.New(pgtest.New(t), txretry.Config{})
	if err != nil {
		t.Fatal(err)
	}
	postgres, err := idempotencypgx.New(manager, idempotencypgx.Config{Lease: lease})
	if err != nil {
		t.Fatal(err)
	}
	if err := postgres.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	return map[string]driver.Store{"memory": idempotencytest.NewStore(), "Redis": redis, "Postgres": postgres}
}
