package expirypgx_test

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/expiry/expirytest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

func holdExpired(row expiry.Row) (outbox.Message, error) {
	m, err := outbox.NewMessage("hold.expired", map[string]any{"hold": row.ID, "seat": row.Values["seat"]})
	m.ID = expiry.EventID("hold.expired", row.ID, row.Deadline) // a repeated message has the same id
	m.Key = row.ID
	return m, err
}

// A service that makes holds and lets them expire. Each expiry commits together with its message.
func ExampleNew() {
	serve := func(ctx context.Context, pool *pgxpool.Pool) error {
		manager, err := txretry.New(pool, txretry.Config{})
		if err != nil {
			return err
		}
		messages, err := outboxpgx.New(pool, outboxpgx.Config{})
		if err != nil {
			return err
		}
		holds, err := expirypgx.New(manager, "holds", expirypgx.Config{
			Columns: []string{"seat"},
			Emit:    expirypgx.Messages(messages.Write, holdExpired),
		})
		if err != nil {
			return err
		}
		sweeper, err := expiry.NewSweeper(holds, expiry.SweeperConfig{})
		if err != nil {
			return err
		}
		return sweeper.Run(ctx) // until ctx is cancelled
	}
	_ = serve
}

// Announce the deadline as the database returned it.
func ExampleStore_Due() {
	hold := func(ctx context.Context, manager *txretry.Manager, holds *expirypgx.Store, seat string) error {
		return manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
			var deadline time.Time
			err := tx.QueryRow(ctx, `INSERT INTO holds (id, seat, status, expires_at)
				VALUES (gen_random_uuid(), $1, 'held', now() + interval '15 minutes') RETURNING expires_at`, seat).Scan(&deadline)
			holds.Due(tx, deadline) // wakes the sweepers after the commit
			return err
		})
	}
	_ = hold
}

// All messages of a batch are written in one call. The same function works with expirytest.
func ExampleMessages() {
	ctx := context.Background()
	manager := txretrytest.New(txretrytest.Config{})
	write := func(_ context.Context, _ pgx.Tx, messages ...outbox.Message) error { // Write of an outbox's store
		for _, m := range messages {
			fmt.Println(m.Name, m.Key)
		}
		return nil
	}
	holds, err := expirytest.New(manager, expirytest.Config{Emit: expirypgx.Messages(write, holdExpired)})
	if err != nil {
		panic(err)
	}
	err = manager.Do(ctx, func(_ context.Context, tx pgx.Tx) error {
		return holds.Put(tx, "A1", time.Now().Add(-time.Minute), "held")
	})
	if err != nil {
		panic(err)
	}
	sweeper, err := expiry.NewSweeper(holds, expiry.SweeperConfig{})
	if err != nil {
		panic(err)
	}
	_, err = sweeper.Sweep(ctx)
	fmt.Println(err)
	// Output:
	// hold.expired A1
	// <nil>
}
