package outboxpgx_test

import (
	"context"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

// Leases are renewed while the process uses every connection of the pool for something else.
func TestRenew_besideAFullPool(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	written(t, f)
	batch, err := f.store.Claim(t.Context(), driver.Claim{Limit: 10, Lease: time.Minute})
	must(t, err)
	for range f.pool.Config().MaxConns {
		conn, err := f.pool.Acquire(t.Context())
		must(t, err)
		defer conn.Release()
	}
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	if stale, err := f.store.Renew(ctx, batch.Leases, time.Minute); err != nil || len(stale) > 0 {
		t.Errorf("Renew: %d leases are lost, error %v", len(stale), err)
	}
}
