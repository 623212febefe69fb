package outboxpgx_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
)

// An order and its message commit together. The commit wakes a relay, in this process or in another.
func ExampleStore_Write() {
	place := func(ctx context.Context, manager *txretry.Manager, store *outboxpgx.Store, order string) error {
		return manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "INSERT INTO orders (id) VALUES ($1)", order); err != nil {
				return err
			}
			m, err := outbox.NewMessage("order.placed", map[string]string{"order": order})
			if err != nil {
				return err
			}
			m.Key = order // messages of one order stay in order
			return store.Write(ctx, tx, m)
		})
	}
	_ = place
}

// After the commit of a transaction outside txretry, Wake notifies a relay.
func ExampleStore_Wake() {
	place := func(ctx context.Context, tx pgx.Tx, store *outboxpgx.Store, m outbox.Message) error {
		if err := store.Write(ctx, tx, m); err != nil {
			return err
		}
		if err := tx.Commit(ctx); err != nil {
			return err
		}
		store.Wake()
		return nil
	}
	_ = place
}

// The files are for a migration tool, which then replaces Migrate.
func ExampleStore_Schema() {
	pool, err := pgxpool.New(context.Background(), "postgres://127.0.0.1") // connects on first use
	if err != nil {
		fmt.Println(err)
		return
	}
	defer pool.Close()
	store, err := outboxpgx.New(pool, outboxpgx.Config{Schema: "shop", Table: "events"})
	if err != nil {
		fmt.Println(err)
		return
	}
	names, err := fs.Glob(store.Schema(), "*.sql")
	fmt.Println(names, err)
	// Output: [0001_outbox.down.sql 0001_outbox.sql 0002_outbox_write.down.sql 0002_outbox_write.sql 0006_outbox_relay.down.sql 0006_outbox_relay.sql] <nil>
}

// Print the fix of each finding, for example in a health command.
func ExampleStore_Check() {
	examine := func(ctx context.Context, store *outboxpgx.Store) error {
		err := store.Check(ctx)
		var joined interface{ Unwrap() []error }
		if !errors.As(err, &joined) {
			return err // nil: all requirements are met
		}
		for _, single := range joined.Unwrap() {
			if finding, ok := single.(interface{ Fix() string }); ok {
				fmt.Println(finding.Fix())
			}
		}
		return err
	}
	_ = examine
}

// Replay dead letters at ten per second.
func ExampleStore_DeadLetters() {
	again := func(ctx context.Context, store *outboxpgx.Store) error {
		replayed, err := store.DeadLetters().Replay(ctx, outbox.Filter{Class: "unroutable"},
			outbox.Replay{By: "ada", Reason: "the queue is back", PerSecond: 10})
		fmt.Println(replayed.Returned)
		return err
	}
	_ = again
}
