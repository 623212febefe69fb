package expirytest_test

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/expiry/expirytest"
	"github.com/holdfast-go/holdfast/internal/prove"
	"github.com/holdfast-go/holdfast/internal/prove/provetest"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

var quiet = slog.New(slog.DiscardHandler)

type emit = func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error

func newHolds(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.New(t)
	messages, err := outboxpgx.New(pool, outboxpgx.Config{})
	must(t, err)
	must(t, messages.Migrate(t.Context()))
	_, err = pool.Exec(t.Context(), `
		CREATE TABLE holds (id text PRIMARY KEY, expires_at timestamptz NOT NULL, status text NOT NULL);
		CREATE INDEX ON holds (expires_at, id) WHERE status = 'held';
		CREATE TABLE freed (seat text NOT NULL)`, pgx.QueryExecModeSimpleProtocol)
	must(t, err)
	return pool
}

func proveSweep(t prove.TB, pool *pgxpool.Pool, emit func(own *pgxpool.Pool, mails *atomic.Int64) emit) {
	var mails atomic.Int64
	expirytest.Prove(t, txretrytest.Proof{
		Pool: pool, Effects: func() int { return int(mails.Load()) },
		Reset: `TRUNCATE holds, freed, holdfast_outbox;
			INSERT INTO holds VALUES ('A1', '2026-01-01', 'held'), ('A2', '2026-01-02', 'held'), ('A3', 'infinity', 'held')`,
		Rows: []string{"TABLE holds", "TABLE freed", "SELECT name FROM holdfast_outbox"},
	}, func(own *pgxpool.Pool) (*expirypgx.Store, error) {
		manager, err := txretry.New(own, txretry.Config{Logger: quiet})
		if err != nil {
			return nil, err
		}
		return expirypgx.New(manager, "holds", expirypgx.Config{Emit: emit(own, &mails), Logger: quiet})
	})
}

func free(ctx context.Context, db interface {
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
}, rows []expiry.Row,
) error {
	var b pgx.Batch
	for _, row := range rows {
		b.Queue("INSERT INTO freed (seat) VALUES ($1)", row.ID)
	}
	return db.SendBatch(ctx, &b).Close()
}

func same(e emit) func(*pgxpool.Pool, *atomic.Int64) emit {
	return func(*pgxpool.Pool, *atomic.Int64) emit { return e }
}

func freeInTx(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error { return free(ctx, tx, rows) }

// A sweep that keeps the rules passes, with messages too.
func TestProve(t *testing.T) {
	t.Parallel()
	for name, emit := range map[string]func(*pgxpool.Pool, *atomic.Int64) emit{
		"statements": same(freeInTx),
		"messages": func(own *pgxpool.Pool, _ *atomic.Int64) emit {
			store, err := outboxpgx.New(own, outboxpgx.Config{Logger: quiet})
			return expirypgx.Messages(store.Write, func(row expiry.Row) (outbox.Message, error) {
				if err != nil {
					return outbox.Message{}, err
				}
				return outbox.NewMessage("hold.expired", row.ID)
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			proveSweep(t, newHolds(t), emit)
		})
	}
}

// Each mistake is caught, and the error says what it is.
func TestProveCatches(t *testing.T) {
	t.Parallel()
	type planted struct {
		emit func(own *pgxpool.Pool, mails *atomic.Int64) emit
		want []string
	}
	for name, plant := range map[string]planted{
		"a write on the pool": {func(own *pgxpool.Pool, _ *atomic.Int64) emit {
			return func(ctx context.Context, _ pgx.Tx, rows []expiry.Row) error { return free(ctx, own, rows) }
		}, []string{"killed after", "+ seat=A1", "It wrote outside of its transaction", "INSERT INTO freed"}},
		"a side effect": {func(_ *pgxpool.Pool, mails *atomic.Int64) emit {
			return func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error {
				mails.Add(int64(len(rows)))
				return free(ctx, tx, rows)
			}
		}, []string{"killed before", "Proof.Effects counts 4, 2 after"}},
		"an error swallowed": {same(func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error {
			_ = free(ctx, tx, rows)
			return nil
		}), []string{"refused by the server as too slow", "it swallowed the error"}},
		"an error swallowed in a savepoint": {same(func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error {
			sp, err := tx.Begin(ctx)
			if err != nil {
				return err
			}
			if free(ctx, sp, rows) != nil {
				return sp.Rollback(ctx)
			}
			return sp.Commit(ctx)
		}), []string{"refused by the server as too slow", "- seat=A1", "swallowed the error, in a savepoint"}},
		"Emit that fails": {same(func(context.Context, pgx.Tx, []expiry.Row) error { return errors.New("no such seat") }),
			[]string{"nothing fails", "no such seat"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newHolds(t)
			provetest.Caught(t, func(t prove.TB) { proveSweep(t, pool, plant.emit) }, plant.want...)
		})
	}
}
