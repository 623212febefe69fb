package memory

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/txretry"
)

// transactor has transactions pass the wire.
type transactor struct {
	txretry.Transactor
	wire Wire
}

// Do implements txretry.Transactor.
func (t transactor) Do(ctx context.Context, fn func(ctx context.Context, tx pgx.Tx) error) error {
	return t.DoWith(ctx, txretry.Options{}, fn)
}

// DoWith implements txretry.Transactor.
func (t transactor) DoWith(ctx context.Context, opts txretry.Options, fn func(ctx context.Context, tx pgx.Tx) error) error {
	return t.wire.Call(ctx, PostgresServer, StepTransaction, func() error {
		return t.Transactor.DoWith(ctx, opts, func(ctx context.Context, tx pgx.Tx) error {
			if err := t.within(ctx, StepBegin); err != nil {
				return err
			}
			if err := fn(ctx, tx); err != nil {
				return err
			}
			return t.within(ctx, StepEnd)
		})
	})
}

// within is a step inside of a transaction. A server that is not reached is one that shuts down.
func (t transactor) within(ctx context.Context, step string) error {
	err := t.wire.Call(ctx, PostgresServer, step, func() error { return nil })
	if _, said := errors.AsType[*pgconn.PgError](err); err == nil || said {
		return err
	}
	return &pgconn.PgError{Severity: "FATAL", Code: "57P01", Message: err.Error()}
}

// source is the outbox as the relay reads it, from a table in Postgres.
type source struct {
	*outboxtest.Store
	wire Wire
}

// Claim implements driver.Source.
func (s source) Claim(ctx context.Context, req driver.Claim) (b driver.Batch, err error) {
	req.Lease = s.wire.Lease(ctx, req.Lease)
	err = s.wire.Call(ctx, PostgresServer, StepClaim, func() (err error) {
		b, err = s.Store.Claim(ctx, req)
		return err
	})
	if err != nil {
		return driver.Batch{}, err
	}
	return b, nil
}

// Renew implements driver.Source.
func (s source) Renew(ctx context.Context, leases []driver.Lease, ttl time.Duration) (stale []driver.Lease, err error) {
	ttl = s.wire.Lease(ctx, ttl)
	err = s.wire.Call(ctx, PostgresServer, StepRenew, func() (err error) {
		stale, err = s.Store.Renew(ctx, leases, ttl)
		return err
	})
	return stale, err
}

// Settle implements driver.Source.
func (s source) Settle(ctx context.Context, b driver.Batch, outcomes []driver.Settlement) (settled driver.Settled, err error) {
	err = s.wire.Call(ctx, PostgresServer, StepSettle, func() (err error) {
		settled, err = s.Store.Settle(ctx, b, outcomes)
		return err
	})
	return settled, err
}
