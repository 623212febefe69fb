package idempotencyredis_test

import (
	"crypto/rand"
	"testing"
	"time"

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
	store := newStore(t, client, idempotencyredis.Config{})
	for range 60 {
		if _, err := store.Begin(t.Context(), idempotency.NewClaim(idempotency.NewKey(), fp)); err != nil {
			t.Fatal(err)
		}
	}
	if used, err := redistest.NodesInUse(t.Context(), client); err != nil || used != 3 {
		t.Errorf("%d nodes hold keys, %v; want 3", used, err)
	}
	findings, err := store.Check(t.Context())
	if err != nil || len(findings) != 0 {
		t.Errorf("Check = %v, %v", findings, err)
	}
}
