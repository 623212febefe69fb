package expirytest_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/expiry/expirytest"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/pgtest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// The rows may be in your own memory. Active returns them, and Expire changes one of them by txretrytest.Effect, so
// that a rollback undoes it.
func Example() {
	held := map[string]time.Time{"seat A1": time.Now().Add(-time.Minute)}
	store, err := expirytest.New(txretrytest.New(txretrytest.Config{}), expirytest.Config{
		Active: func() (rows []expiry.Row) {
			for id, deadline := range held {
				rows = append(rows, expiry.Row{ID: id, Deadline: deadline})
			}
			return rows
		},
		Expire: func(_ context.Context, tx pgx.Tx, row expiry.Row) error {
			return txretrytest.Effect(tx, func() { delete(held, row.ID) }, func() { held[row.ID] = row.Deadline })
		},
	})
	if err != nil {
		panic(err)
	}
	sweeper, err := expiry.NewSweeper(store, expiry.SweeperConfig{})
	if err != nil {
		panic(err)
	}
	report, err := sweeper.Sweep(context.Background())
	fmt.Println(report.Expired, len(held), err)
	// Output: 1 0 <nil>
}

// Without your own rows, Put writes rows and Get reads them.
func ExampleStore_Put() {
	ctx := context.Background()
	manager := txretrytest.New(txretrytest.Config{})
	holds, err := expirytest.New(manager, expirytest.Config{})
	if err != nil {
		panic(err)
	}
	err = manager.Do(ctx, func(_ context.Context, tx pgx.Tx) error {
		deadline := time.Now().Add(-time.Second)
		holds.Due(tx, deadline) // wakes running sweepers
		return holds.Put(tx, "seat A1", deadline, "held")
	})
	if err != nil {
		panic(err)
	}
	sweeper, err := expiry.NewSweeper(holds, expiry.SweeperConfig{})
	if err != nil {
		panic(err)
	}
	if _, err := sweeper.Sweep(ctx); err != nil {
		panic(err)
	}
	_, state, _ := holds.Get("seat A1")
	fmt.Println(state)
	// Output: expired
}

// A test of a sweep and its Emit on Postgres.
func ExampleProve() {
	var t *testing.T // the t of your test

	pool := pgtest.New(t)
	// … CREATE TABLE holds, with its index, and freed …
	proof := txretrytest.Proof{
		Pool:  pool,
		Reset: "TRUNCATE holds, freed; INSERT INTO holds (id, expires_at, status) VALUES ('A1', '2026-01-01', 'held')",
		Rows:  []string{"SELECT id, status FROM holds", "TABLE freed"},
	}
	emit := func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error {
		for _, row := range rows {
			if _, err := tx.Exec(ctx, "INSERT INTO freed (seat) VALUES ($1)", row.ID); err != nil {
				return err
			}
		}
		return nil
	}
	expirytest.Prove(t, proof, func(pool *pgxpool.Pool) (*expirypgx.Store, error) {
		manager, err := txretry.New(pool, txretry.Config{})
		if err != nil {
			return nil, err
		}
		return expirypgx.New(manager, "holds", expirypgx.Config{Emit: emit})
	})
}
