package outboxpgx_test

import (
	"context"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"os"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/outbox"
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
