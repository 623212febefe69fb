package postgres

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/txretry"
)

// Once runs fn in a transaction and stores its response there; *idempotencypgx.Store implements it.
type Once interface {
	DoWith(ctx context.Context, o txretry.Options,
		fn func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error)) (idempotency.Response, error)
}

// Shop is the shop in Postgres. It implements httpapi.Backend.
type Shop struct {
	Reader
	once   Once
	outbox Outbox
	holds  Holds
	flow   flow.Flow
}

// NewShop returns a shop that reads through pool and writes in transactions of
// once, which it tells f of.
func NewShop(pool *pgxpool.Pool, once Once, outbox Outbox, holds Holds, f flow.Flow) *Shop {
	return &Shop{Reader: NewReader(pool), once: once, outbox: outbox, holds: holds, flow: f}
}

// Once implements httpapi.Backend.
func (s *Shop) Once(ctx context.Context, eventID string,
	fn func(ctx context.Context, w booking.Work) (idempotency.Response, error),
) (idempotency.Response, error) {
	opts := txretry.Options{Name: "shop"}
	if eventID != "" {
		opts.SerialKey = "event:" + eventID
	}
	return s.once.DoWith(ctx, opts, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		txretry.AfterCommit(tx, func() { s.flow.Note(flow.Transaction, "committed") })
		return fn(ctx, &work{tx: tx, outbox: s.outbox, holds: s.holds})
	})
}
