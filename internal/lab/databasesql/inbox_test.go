package databasesql

import (
	"context"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrysql"
)

// inbox returns a store of one consumer whose handler takes an effect in the *sql.Tx, and then calls fn.
func (f *fixture) inbox(t *testing.T, cfg txretry.Config, consumer string, fn func(ctx context.Context, tx pgx.Tx, number int) error) *inboxpgx.Store {
	t.Helper()
	store, err := inboxpgx.New(f.manager(t, cfg), consumer, inboxpgx.Config{})
	must(t, err)
	must(t, store.Migrate(t.Context()))
	f.exec(t, `CREATE TABLE IF NOT EXISTS effects (consumer text, number int)`)
	must(t, inboxpgx.Handle(store, conformance.Name, func(ctx context.Context, tx pgx.Tx, e conformance.Event) error {
		if _, err := txretrysql.Tx(tx).ExecContext(ctx, `INSERT INTO effects VALUES ($1, $2)`, consumer, e.Number); err != nil {
			return err
		}
		return fn(ctx, tx, e.Number)
	}))
	return store
}

func event(number string) *inbox.Message {
	return &inbox.Message{ID: uuid.Must(uuid.NewV7()), Name: conformance.Name, Body: []byte(`{"number": ` + number + `}`), ContentType: "application/json", Attempt: 1}
}

func TestInboxProcessor(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, one *fixture) {
		conformance.TestProcessor(t, conformance.Backend{New: func(t *testing.T) conformance.Fixture {
			f := setup(t, one.driver)
			return conformance.Fixture{
				Processor: func(t *testing.T, consumer string, h conformance.Handler) inbox.Processor {
					return f.inbox(t, txretry.Config{}, consumer, func(ctx context.Context, _ pgx.Tx, number int) error {
						return h(ctx, conformance.Event{Number: number})
					})
				},
				Effects: func(t *testing.T, consumer string, number int) int {
					return f.count(t, `SELECT count(*) FROM effects WHERE consumer = $1 AND number = $2`, consumer, number)
				},
			}
		}})
	})
}

// In a batch a conflict runs all of it again; what fails otherwise fails alone.
func TestInboxBatch(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, f *fixture) {
		conflicts := 2
		store := f.inbox(t, txretry.Config{BaseDelay: time.Millisecond}, "a", func(ctx context.Context, tx pgx.Tx, number int) (err error) {
			switch {
			case number == 2:
				_, err = txretrysql.Tx(tx).ExecContext(ctx, raise("23505"))
			case number == 3 && conflicts > 0:
				conflicts--
				_, err = txretrysql.Tx(tx).ExecContext(ctx, raise("40001"))
			}
			return err
		})
		messages := []*inbox.Message{event("1"), event("2"), event("3")}
		for range 2 { // the second time all but the failed one are duplicates
			results := store.Process(t.Context(), messages)
			if results[0] != nil || results[1] == nil || results[2] != nil {
				t.Errorf("results %v", results)
			}
		}
		if n := f.count(t, `SELECT count(*) FROM effects`); n != 2 || conflicts != 0 {
			t.Errorf("%d effects, %d conflicts left", n, conflicts)
		}
	})
}

// A server that breaks off the connection under a handler fails no message.
func TestInboxConnectionLost(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, f *fixture) {
		store := f.inbox(t, txretry.Config{}, "a", func(ctx context.Context, tx pgx.Tx, _ int) error {
			var pid int
			must(t, txretrysql.Tx(tx).QueryRowContext(ctx, "select pg_backend_pid()").Scan(&pid))
			f.exec(t, "select pg_terminate_backend($1, 5000)", pid)
			_, err := txretrysql.Tx(tx).ExecContext(ctx, "select 1")
			return err
		})
		err := store.Process(t.Context(), []*inbox.Message{event("1")})[0]
		if !driver.Classify(err).Unavailable {
			t.Errorf("error %v, want one of inbox.Unavailable", err)
		}
	})
}
