package idempotencyredis_test

import (
	"testing"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// A replica that has taken over takes keys, though nobody refers the client to it.
func TestClusterFailover(t *testing.T) {
	t.Parallel()
	client, failOver := redistest.Failover(t)
	s := newStore(t, client, idempotencyredis.Config{})
	begin := func() error {
		_, err := s.Begin(t.Context(), driver.NewClaim(driver.Key(idempotency.NewKey()), fp))
		return err
	}
	if err := begin(); err != nil {
		t.Fatal(err)
	}
	failOver()
	testenv.Eventually(t, begin)
}
