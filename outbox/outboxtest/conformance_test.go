package outboxtest_test

import (
	"context"
	"os"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/outbox/outboxtest/conformance"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func TestStore(t *testing.T) {
	backend := conformance.Backend{Bubble: true, Open: open}
	t.Run("writer", func(t *testing.T) { conformance.TestWriter(t, backend) })
	t.Run("source", func(t *testing.T) { conformance.TestSource(t, backend) })
}

func TestManagedWriter(t *testing.T) {
	conformance.TestManagedWriter(t, conformance.ManagedBackend{Bubble: true, Open: func(*testing.T) conformance.Managed {
		manager, store := txretrytest.New(txretrytest.Config{}), outboxtest.NewStore()
		return conformance.Managed{
			Store: over(manager, store), Manager: manager, Write: store.Write, WriteOnce: store.WriteOnce,
			Break: func(_ context.Context, tx pgx.Tx) error {
				return txretrytest.Fail(tx, &pgconn.PgError{Severity: "ERROR", Code: "22012"})
			},
		}
	}})
}

func open(*testing.T) conformance.Store {
	return over(txretrytest.New(txretrytest.Config{}), outboxtest.NewStore())
}

func over(manager *txretrytest.Manager, store *outboxtest.Store) conformance.Store {
	return conformance.Store{
		Source: store,
		InTx: func(ctx context.Context, fn func(func(...outbox.Message) error) error) error {
			return manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
				return fn(func(msgs ...outbox.Message) error { return store.Write(ctx, tx, msgs...) })
			})
		},
		OnceInTx: func(ctx context.Context, fn func(conformance.Once) error) error {
			return manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
				return fn(func(key string, m outbox.Message) (uuid.UUID, bool, error) { return store.WriteOnce(ctx, tx, key, m) })
			})
		},
		Dead: func(context.Context) ([]driver.Message, error) {
			var dead []driver.Message
			for _, d := range store.DeadLetters() {
				dead = append(dead, d.Message)
			}
			return dead, nil
		},
	}
}

func TestPublisher(t *testing.T) {
	conformance.TestPublisher(t, conformance.PublisherBackend{Bubble: true, Open: func(*testing.T) conformance.PublisherCase {
		p := outboxtest.NewPublisher()
		unroutable := driver.Message{Name: "nobody.listens"}
		broken := false
		p.Respond(func(m driver.Message) error {
			switch {
			case broken:
				return &driver.PublishError{Class: driver.Unavailable}
			case m.Name == unroutable.Name:
				return &driver.PublishError{Class: driver.Unroutable}
			}
			return nil
		})
		return conformance.PublisherCase{
			Publisher:  p,
			Received:   func(context.Context) ([]driver.Message, error) { return p.Received(), nil },
			Unroutable: unroutable,
			Break:      func() { broken = true },
			Mend:       func() { broken = false },
		}
	}})
}

func TestStoreShowsNothingUncommitted(t *testing.T) {
	for _, tc := range []struct {
		point txretrytest.Point
		want  int
	}{
		{txretrytest.ReplyLostApplied, 1},
		{txretrytest.ReplyLostNotApplied, 0},
	} {
		manager := txretrytest.New(txretrytest.Config{Script: []txretrytest.Fault{{Point: tc.point}}})
		store := outboxtest.NewStore()
		err := manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			if err := store.Write(ctx, tx, outbox.Message{Name: "a", Body: []byte("1")}); err != nil {
				return err
			}
			batch, err := store.Claim(ctx, driver.Claim{Limit: 1, Lease: 1})
			if len(batch.Messages) > 0 {
				t.Error("claimed before the commit")
			}
			return err
		})
		if err == nil {
			t.Error("the reply was not lost")
		}
		if got := len(store.List()); got != tc.want {
			t.Errorf("%v: %d messages committed, want %d", tc.point, got, tc.want)
		}
	}
}

func TestStoreRefusesARealTransaction(t *testing.T) {
	store := outboxtest.NewStore()
	for _, tx := range []pgx.Tx{nil, struct{ pgx.Tx }{}} {
		if err := store.Write(t.Context(), tx, outbox.Message{Name: "a", Body: []byte("1")}); err == nil {
			t.Errorf("accepted %T", tx)
		}
	}
}

func TestStoreRetry(t *testing.T) {
	s := open(t)
	store := s.Source.(*outboxtest.Store)
	m := outbox.Message{Name: "a", Key: "k", Body: []byte("1")}
	if err := s.InTx(t.Context(), func(write func(...outbox.Message) error) error { return write(m) }); err != nil {
		t.Fatal(err)
	}
	batch, err := store.Claim(t.Context(), driver.Claim{Limit: 1, Lease: 1})
	if err != nil {
		t.Fatal(err)
	}
	id := batch.Messages[0].ID
	if store.Retry(id) {
		t.Error("retried a message that is not dead")
	}
	if _, err := store.Settle(t.Context(), batch, []driver.Settlement{{ID: id, Verdict: driver.Dead}}); err != nil {
		t.Fatal(err)
	}
	if !store.Retry(id) || len(store.DeadLetters()) != 0 || store.List()[0].Attempts != 0 {
		t.Errorf("after the retry: %+v", store.List())
	}
}
