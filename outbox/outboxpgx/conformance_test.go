package outboxpgx_test

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxtest/conformance"
	"github.com/holdfast-go/holdfast/txretry/txretrysql"
)

type write = func(...outbox.Message) error

func TestConformance(t *testing.T) {
	t.Parallel()
	pgtest.New(t) // skips before there are subtests
	for name, inTx := range map[string]func(*fixture, context.Context, func(write) error) error{
		"txretry":      inManaged,
		"raw pgx":      inRaw,
		"database sql": inSQL,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conformance.TestWriter(t, conformance.Backend{Open: func(t *testing.T) conformance.Store {
				f := setup(t, outboxpgx.Config{})
				return f.backend(func(ctx context.Context, fn func(write) error) error { return inTx(f, ctx, fn) })
			}})
		})
	}
	for name, cfg := range map[string]outboxpgx.Config{
		"deleting":  {},
		"retention": {Retention: 1 << 40, Table: "my_events"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			backend := conformance.Backend{Open: func(t *testing.T) conformance.Store {
				f := setup(t, cfg)
				return f.backend(func(ctx context.Context, fn func(write) error) error { return inManaged(f, ctx, fn) })
			}}
			conformance.TestSource(t, backend)
			if name == "deleting" || os.Getenv(testenv.NightlyVar) == "1" {
				conformance.TestDeadLetters(t, backend)
			}
		})
	}
}

func TestConformanceBehindPgBouncer(t *testing.T) {
	t.Parallel()
	backend := conformance.Backend{Open: func(t *testing.T) conformance.Store {
		f := setupOn(t, pgtest.NewPooled(t), outboxpgx.Config{PollOnly: true})
		return f.backend(func(ctx context.Context, fn func(write) error) error { return inManaged(f, ctx, fn) })
	}}
	t.Run("writer", func(t *testing.T) { t.Parallel(); conformance.TestWriter(t, backend) })
	if os.Getenv(testenv.NightlyVar) != "1" {
		return // a pooler changes nothing else
	}
	t.Run("source", func(t *testing.T) { t.Parallel(); conformance.TestSource(t, backend) })
	t.Run("dead letters", func(t *testing.T) { t.Parallel(); conformance.TestDeadLetters(t, backend) })
}

func TestManagedWriter(t *testing.T) {
	t.Parallel()
	pgtest.New(t) // skips before there are subtests
	conformance.TestManagedWriter(t, conformance.ManagedBackend{Open: func(t *testing.T) conformance.Managed {
		f := setup(t, outboxpgx.Config{})
		return conformance.Managed{
			Store:   f.backend(func(ctx context.Context, fn func(write) error) error { return inManaged(f, ctx, fn) }),
			Manager: f.manager, Write: f.store.Write, WriteOnce: f.store.WriteOnce,
			Break: func(ctx context.Context, tx pgx.Tx) error {
				_, err := tx.Exec(ctx, "SELECT 1/0")
				return err
			},
		}
	}})
}

func inManaged(f *fixture, ctx context.Context, fn func(write) error) error {
	return f.manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		return fn(func(msgs ...outbox.Message) error { return f.store.Write(ctx, tx, msgs...) })
	})
}

func inRaw(f *fixture, ctx context.Context, fn func(write) error) error {
	return pgx.BeginFunc(ctx, f.pool, func(tx pgx.Tx) error {
		return fn(func(msgs ...outbox.Message) error { return f.store.Write(ctx, tx, msgs...) })
	})
}

func inSQL(f *fixture, ctx context.Context, fn func(write) error) error {
	db := stdlib.OpenDBFromPool(f.pool)
	defer db.Close()
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := fn(func(msgs ...outbox.Message) error { return f.store.Write(ctx, txretrysql.Wrap(tx), msgs...) }); err != nil {
		return err
	}
	return tx.Commit()
}

// The modes without prepared statements are what old poolers need; they know the types of the
// arguments by their Go types alone.
func TestEveryExecMode(t *testing.T) {
	t.Parallel()
	pgtest.InEveryMode(t, func(t *testing.T, inMode func(*pgxpool.Pool) *pgxpool.Pool) {
		f := setupOn(t, inMode(pgtest.New(t)), outboxpgx.Config{})
		f.store.Claims(driver.Lanes, 0)

		m := outbox.Message{Name: "a", Body: []byte("{}")}
		f.write(t, m)
		f.write(t, m, m)
		batch, err := f.store.Claim(t.Context(), driver.Claim{Limit: 10, Lease: time.Minute})
		must(t, err)
		if len(batch.Messages) != 3 {
			t.Fatalf("claimed %d messages, want 3", len(batch.Messages))
		}
		_, err = f.store.Settle(t.Context(), batch, []driver.Settlement{
			{ID: batch.Messages[0].ID, Verdict: driver.Published},
			{ID: batch.Messages[1].ID, Verdict: driver.Failed, Delay: time.Hour, Class: driver.Retryable, Err: "failed"},
			{ID: batch.Messages[2].ID, Verdict: driver.Dead, Class: driver.Permanent, Err: "dead"},
		})
		must(t, err)
		stats, err := f.store.Depth(t.Context())
		must(t, err)
		if stats.Ready != 0 || stats.Parked != 1 || stats.Dead != 1 {
			t.Errorf("after Settle: %+v", stats)
		}
		letter, err := f.dead.Show(t.Context(), batch.Messages[2].ID)
		must(t, err)
		if n, err := f.dead.Replay(t.Context(), outbox.Filter{IDs: []uuid.UUID{letter.ID}}, outbox.Replay{By: "me"}); n.Returned != 1 || err != nil {
			t.Errorf("retried %d, %v", n, err)
		}
	})
}
