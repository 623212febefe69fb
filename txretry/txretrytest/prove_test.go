package txretrytest_test

import (
	"context"
	"log/slog"
	"path"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/prove"
	"github.com/holdfast-go/holdfast/internal/prove/provetest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

type transaction = func(ctx context.Context, tx pgx.Tx) error

func newStock(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.New(t)
	_, err := pool.Exec(t.Context(), "CREATE TABLE stock (n int NOT NULL); CREATE TABLE sold (seat text NOT NULL)", pgx.QueryExecModeSimpleProtocol)
	if err != nil {
		t.Fatal(err)
	}
	return pool
}

// proveSale proves a transaction of each process.
func proveSale(t prove.TB, pool *pgxpool.Pool, cfg txretry.Config, process func(own *pgxpool.Pool) transaction) {
	txretrytest.Prove(t, txretrytest.Proof{
		Pool: pool, Reset: "TRUNCATE stock, sold; INSERT INTO stock VALUES (7)", Rows: []string{"TABLE stock", "TABLE sold"},
	}, func(own *pgxpool.Pool) (func(ctx context.Context) error, error) {
		fn := process(own)
		cfg.Logger = slog.New(slog.DiscardHandler)
		manager, err := txretry.New(own, cfg)
		return func(ctx context.Context) error { return manager.Do(ctx, fn) }, err
	})
}

func sell(ctx context.Context, tx pgx.Tx, seats ...string) error {
	if _, err := tx.Exec(ctx, "UPDATE stock SET n = n - $1", len(seats)); err != nil {
		return err
	}
	for _, seat := range seats {
		if _, err := tx.Exec(ctx, "INSERT INTO sold (seat) VALUES ($1)", seat); err != nil {
			return err
		}
	}
	return nil
}

// A correct transaction passes, however its statements are sent.
func TestProve(t *testing.T) {
	t.Parallel()
	pgtest.InEveryMode(t, func(t *testing.T, inMode func(*pgxpool.Pool) *pgxpool.Pool) {
		if path.Base(t.Name()) != "cache_statement" {
			testenv.Nightly(t, "a variant")
		}
		proveSale(t, inMode(newStock(t)), txretry.Config{}, func(*pgxpool.Pool) transaction {
			return func(ctx context.Context, tx pgx.Tx) error { return sell(ctx, tx, "A1", "A2") }
		})
	})
}

// Prove works with a manager that finds the outcome of a COMMIT.
func TestProveWithXactStatus(t *testing.T) {
	t.Parallel()
	proveSale(t, newStock(t), txretry.Config{XactStatus: true}, func(*pgxpool.Pool) transaction {
		return func(ctx context.Context, tx pgx.Tx) error { return sell(ctx, tx, "A1") }
	})
}

// Prove finds each mistake, and the error describes it.
func TestProveCatches(t *testing.T) {
	t.Parallel()
	var kept *pgxpool.Conn
	t.Cleanup(func() {
		if kept != nil { // nil if that subtest did not run
			kept.Release()
		}
	})
	for name, plant := range map[string]struct {
		process func(own *pgxpool.Pool) transaction
		want    []string
	}{
		"a write on the pool": {func(own *pgxpool.Pool) transaction {
			return func(ctx context.Context, tx pgx.Tx) error {
				if _, err := own.Exec(ctx, "INSERT INTO sold (seat) VALUES ('log')"); err != nil {
					return err
				}
				return sell(ctx, tx, "A1")
			}
		}, []string{"killed after statement 2 of 5 (INSERT", "+ seat=log", "Outside a transaction: INSERT INTO sold"}},
		"a variable that is not set anew": {func(*pgxpool.Pool) transaction {
			var seats []string
			return func(ctx context.Context, tx pgx.Tx) error {
				seats = append(seats, "A1")
				return sell(ctx, tx, seats...)
			}
		}, []string{"+ seat=A1", "ran twice in one process"}},
		"a connection that is kept": {func(own *pgxpool.Pool) transaction {
			return func(ctx context.Context, tx pgx.Tx) (err error) {
				if kept, err = own.Acquire(ctx); err != nil {
					return err
				}
				return sell(ctx, tx, "A1")
			}
		}, []string{"nothing fails", "1 connections were not returned"}},
		"a panic": {func(*pgxpool.Pool) transaction {
			return func(context.Context, pgx.Tx) error { panic("boom") }
		}, []string{"nothing fails: panic: boom"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if name == "a connection that is kept" {
				testenv.Nightly(t, "Prove waits 10 s for it")
			}
			pool := newStock(t)
			provetest.Caught(t, func(t prove.TB) { proveSale(t, pool, txretry.Config{}, plant.process) }, plant.want...)
		})
	}
}

// Prove reports missing fields of a Proof, and errors of its SQL.
func TestProveRefuses(t *testing.T) {
	t.Parallel()
	start := func(*pgxpool.Pool) (func(ctx context.Context) error, error) {
		return func(context.Context) error { return nil }, nil
	}
	provetest.Caught(t, func(t prove.TB) { txretrytest.Prove(t, txretrytest.Proof{}, start) },
		"Proof.Pool is nil", "Proof.Reset is empty", "Proof.Rows is empty")
	pool := newStock(t)
	provetest.Caught(t, func(t prove.TB) {
		txretrytest.Prove(t, txretrytest.Proof{Pool: pool, Reset: "TRUNCATE shelf", Rows: []string{"TABLE stock"}}, start)
	}, `Proof.Reset: ERROR: relation "shelf" does not exist`)
	provetest.Caught(t, func(t prove.TB) {
		txretrytest.Prove(t, txretrytest.Proof{Pool: pool, Reset: "TRUNCATE stock", Rows: []string{"TABLE shelf"}}, start)
	}, `Proof.Rows[0], TABLE shelf: ERROR: relation "shelf" does not exist`)
}
