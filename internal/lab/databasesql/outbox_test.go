package databasesql

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxtest/conformance"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrysql"
)

// outbox returns an outbox that has its tables.
func (f *fixture) outbox(t *testing.T) *outboxpgx.Store {
	t.Helper()
	store, err := outboxpgx.New(f.pool, outboxpgx.Config{})
	must(t, err)
	must(t, store.Migrate(t.Context()))
	return store
}

// inTx is a transaction of one kind.
type inTx func(ctx context.Context, fn func(tx pgx.Tx) error) error

// wrapped is a transaction of the user's own.
func (f *fixture) wrapped(ctx context.Context, fn func(tx pgx.Tx) error) error {
	tx, err := f.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := fn(txretrysql.Wrap(tx)); err != nil {
		return err
	}
	return tx.Commit()
}

func backend(f *fixture, store *outboxpgx.Store, in inTx) conformance.Store {
	return conformance.Store{
		Source: store,
		InTx: func(ctx context.Context, fn func(func(...outbox.Message) error) error) error {
			return in(ctx, func(tx pgx.Tx) error {
				return fn(func(msgs ...outbox.Message) error { return store.Write(ctx, tx, msgs...) })
			})
		},
		OnceInTx: func(ctx context.Context, fn func(conformance.Once) error) error {
			return in(ctx, func(tx pgx.Tx) error {
				return fn(func(key string, m outbox.Message) (uuid.UUID, bool, error) { return store.WriteOnce(ctx, tx, key, m) })
			})
		},
		DeadLetters: store.DeadLetters(),
	}
}

func TestOutboxWriter(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, one *fixture) {
		managed := func(t *testing.T) conformance.Managed {
			f := setup(t, one.driver)
			m, store := f.manager(t, txretry.Config{}), f.outbox(t)
			return conformance.Managed{
				Store: backend(f, store, func(ctx context.Context, fn func(tx pgx.Tx) error) error {
					return m.Do(ctx, func(_ context.Context, tx pgx.Tx) error { return fn(tx) })
				}),
				Manager: m, Write: store.Write, WriteOnce: store.WriteOnce,
				Break: func(ctx context.Context, tx pgx.Tx) error {
					_, err := tx.Exec(ctx, "SELECT 1/0")
					return err
				},
			}
		}
		t.Run("managed", func(t *testing.T) {
			t.Parallel()
			conformance.TestWriter(t, conformance.Backend{Open: func(t *testing.T) conformance.Store { return managed(t).Store }})
		})
		t.Run("errors", func(t *testing.T) {
			t.Parallel()
			conformance.TestManagedWriter(t, conformance.ManagedBackend{Open: managed})
		})
		t.Run("wrapped", func(t *testing.T) {
			t.Parallel()
			testenv.Nightly(t, "the same suite in transactions of the user's own")
			conformance.TestWriter(t, conformance.Backend{Open: func(t *testing.T) conformance.Store {
				f := setup(t, one.driver)
				return backend(f, f.outbox(t), f.wrapped)
			}})
		})
	})
}

// The commit of a Manager wakes a relay; that of the user's own transaction does so by Wake.
func TestOutboxWakesARelay(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, f *fixture) {
		store := f.outbox(t)
		woken := make(chan struct{}, 10)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			store.Background(ctx, func() bool { woken <- struct{}{}; return true })
		}()
		defer func() { cancel(); <-ended }()
		await := func(what string) {
			t.Helper()
			select {
			case <-woken:
			case <-time.After(testenv.Patience):
				t.Errorf("%s woke no relay", what)
			}
		}
		m := outbox.Message{Name: "a", Body: []byte("1")}
		testenv.Eventually(t, func() error {
			if !store.Hears() {
				return errors.New("nobody listens")
			}
			return nil
		})
		for len(woken) > 0 { // at its beginning, and once it listens
			<-woken
		}
		must(t, f.manager(t, txretry.Config{}).Do(ctx, func(ctx context.Context, tx pgx.Tx) error { return store.Write(ctx, tx, m) }))
		await("a Manager")
		for len(woken) > 0 {
			<-woken
		}
		must(t, f.wrapped(ctx, func(tx pgx.Tx) error { return store.Write(ctx, tx, m) }))
		store.Wake()
		await("Wake")
	})
}
