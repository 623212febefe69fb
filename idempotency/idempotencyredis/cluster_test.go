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
	store := func(t *testing.T, cfg idempotencyredis.Config) idempotency.Store {
		cfg.Prefix = "test:" + rand.Text()
		return newStore(t, client, cfg)
	}
	const brief = 5 * time.Second
	backend := conformance.Backend{
		New:   func(t *testing.T) idempotency.Store { return store(t, idempotencyredis.Config{}) },
		Brief: func(t *testing.T) idempotency.Store { return store(t, idempotencyredis.Config{Lease: brief}) },
		Fading: func(t *testing.T) (idempotency.Store, time.Duration) {
			return store(t, idempotencyredis.Config{Lease: brief, Retention: brief}), brief
		},
	}
	t.Run("store", func(t *testing.T) { conformance.TestStore(t, backend) })
	t.Run("middleware", func(t *testing.T) { conformance.TestMiddleware(t, backend) })

	// The suites above mean something only if the keys are spread.
	spread := newStore(t, client, idempotencyredis.Config{})
	for range 60 {
		if _, err := spread.Begin(t.Context(), idempotency.NewClaim(idempotency.NewKey(), fp)); err != nil {
			t.Fatal(err)
		}
	}
	if used, err := redistest.NodesInUse(t.Context(), client); err != nil || used != 3 {
		t.Errorf("%d nodes hold keys, %v; want 3", used, err)
	}
	findings, err := spread.Check(t.Context())
	if err != nil || len(findings) != 0 {
		t.Errorf("Check = %v, %v", findings, err)
	}
}
