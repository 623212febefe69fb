package httpapi_test

import (
	"testing"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/memory"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/postgres"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
)

// onBoth runs a test on both back ends.
func onBoth(t *testing.T, test func(t *testing.T, s *shop)) {
	t.Parallel()
	t.Run("memory", func(t *testing.T) {
		t.Parallel()
		test(t, newShop(t, 0))
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		test(t, newPostgresShop(t))
	})
}

// newPostgresShop is newShop on a real database; keys and limits stay in memory.
func newPostgresShop(t *testing.T) *shop {
	t.Helper()
	pool := pgtest.New(t)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	store, err := outboxpgx.New(pool, outboxpgx.Config{})
	must(err)
	must(store.Migrate(t.Context()))
	must(postgres.Migrate(t.Context(), pool))
	parts, err := memory.Open(memory.Config{})
	must(err)
	transactor, err := txretry.New(pool, txretry.Config{})
	must(err)
	once, err := idempotencypgx.New(transactor, idempotencypgx.Config{Gate: parts.Keys})
	must(err)
	must(once.Migrate(t.Context()))
	holds, err := expirypgx.New(transactor, "reservations", expirypgx.Config{PollOnly: true})
	must(err)
	backend := postgres.NewShop(pool, once, store, holds, flow.New())
	return &shop{
		t: t, handler: newHandler(t, parts, backend, 1_000_000),
		messages: func() (n int) {
			must(pool.QueryRow(t.Context(), "select count(*) from holdfast_outbox").Scan(&n))
			return n
		},
	}
}
