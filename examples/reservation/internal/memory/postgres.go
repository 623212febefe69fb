package memory

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/txretry"
)

// transactor runs no transaction while Postgres is off.
type transactor struct {
	txretry.Transactor
	postgres *Server
}

// Do implements txretry.Transactor.
func (t transactor) Do(ctx context.Context, fn func(ctx context.Context, tx pgx.Tx) error) error {
	return t.DoWith(ctx, txretry.Options{}, fn)
}

// DoWith implements txretry.Transactor. Switched off, the server answers every transaction that it is shut down.
func (t transactor) DoWith(ctx context.Context, opts txretry.Options, fn func(ctx context.Context, tx pgx.Tx) error) error {
	return t.Transactor.DoWith(ctx, opts, func(ctx context.Context, tx pgx.Tx) error {
		if err := t.postgres.Ready(ctx); err != nil {
			return &pgconn.PgError{Severity: "FATAL", Code: "57P01", Message: err.Error()}
		}
		return fn(ctx, tx)
	})
}

// source is the outbox as the relay reads it, from a table in Postgres.
type source struct {
	*outboxtest.Store
	postgres *Server
}

// Claim implements driver.Source.
func (s source) Claim(ctx context.Context, req driver.Claim) (driver.Batch, error) {
	if err := s.postgres.Ready(ctx); err != nil {
		return driver.Batch{}, err
	}
	return s.Store.Claim(ctx, req)
}

// Renew implements driver.Source.
func (s source) Renew(ctx context.Context, leases []driver.Lease, ttl time.Duration) (stale []driver.Lease, err error) {
	if err := s.postgres.Ready(ctx); err != nil {
		return nil, err
	}
	return s.Store.Renew(ctx, leases, ttl)
}

// Settle implements driver.Source.
func (s source) Settle(ctx context.Context, b driver.Batch, outcomes []driver.Settlement) ([]driver.Lease, error) {
	if err := s.postgres.Ready(ctx); err != nil {
		return nil, err
	}
	return s.Store.Settle(ctx, b, outcomes)
}
