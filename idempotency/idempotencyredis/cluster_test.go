package idempotencyredis_test

import (
	"context"
	"crypto/rand"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest/conformance"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

func TestOnCluster(t *testing.T) {
	t.Parallel()
	client, _ := redistest.Cluster(t)
	stores := func(lease time.Duration) func(*testing.T) idempotency.Store {
		return func(t *testing.T) idempotency.Store {
			return newStore(t, client, idempotencyredis.Config{Prefix: "test:" + rand.Text(), Lease: lease})
		}
	}
	backend := conformance.Backend{New: stores(0), Brief: stores(3 * time.Second)}
	t.Run("store", func(t *testing.T) { conformance.TestStore(t, backend) })
	t.Run("middleware", func(t *testing.T) { conformance.TestMiddleware(t, backend) })

	// The suites above mean something only if the keys are spread.
	var mu sync.Mutex
	used := 0
	err := client.ForEachMaster(t.Context(), func(ctx context.Context, node *redis.Client) error {
		store := newStore(t, client, idempotencyredis.Config{})
		for range 20 {
			if _, err := store.Begin(ctx, idempotency.NewClaim(idempotency.NewKey(), fp)); err != nil {
				return err
			}
		}
		n, err := node.DBSize(ctx).Result()
		mu.Lock()
		defer mu.Unlock()
		if n > 0 {
			used++
		}
		return err
	})
	if err != nil || used != 3 {
		t.Errorf("%d nodes hold keys, %v; want 3", used, err)
	}
	findings, err := newStore(t, client, idempotencyredis.Config{}).Check(t.Context())
	if err != nil || len(findings) != 0 {
		t.Errorf("Check = %v, %v", findings, err)
	}
}
