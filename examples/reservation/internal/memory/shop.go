package memory

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/expiry/expirytest"
	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/txretry"
)

// Shop is the shop in memory. It implements httpapi.Backend.
type Shop struct {
	*Store
	once   *idempotencypgx.Store
	outbox Outbox
	holds  *expirytest.Store
}

// Once implements httpapi.Backend. All transactions wait for each other here, whatever their event.
func (s *Shop) Once(ctx context.Context, _ string,
	fn func(ctx context.Context, w booking.Work) (idempotency.Response, error),
) (idempotency.Response, error) {
	return s.once.DoWith(ctx, txretry.Options{Name: "shop"}, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		txretry.AfterCommit(tx, func() { s.flow.Note(flow.Transaction, "committed") })
		return fn(ctx, s.work(tx))
	})
}

func (s *Shop) work(tx pgx.Tx) *work {
	return &work{Store: s.Store, tx: tx, outbox: s.outbox, holds: s.holds, now: clock()}
}
