package inboxtest_test

import (
	"context"
	"fmt"
	"log/slog"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/pgtest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

type orderPlaced struct {
	Order string `json:"order"`
}

// A handler of production on the fakes: the broker delivers every message twice, and its effect
// is taken once.
func Example() {
	books, err := inboxtest.New(txretrytest.New(txretrytest.Config{}), "billing", inboxpgx.Config{})
	if err != nil {
		fmt.Println(err)
		return
	}
	err = inboxpgx.Handle(books, "order.placed", func(_ context.Context, _ pgx.Tx, o orderPlaced) error {
		fmt.Println("invoice for", o.Order)
		return nil
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	broker := inboxtest.NewBroker()
	consumer, err := inboxtest.NewConsumer(broker, "billing", books, inboxtest.Config{
		ConsumerConfig: inbox.ConsumerConfig{Logger: slog.New(slog.DiscardHandler)},
		Names:          []string{"order.*"},
		Fault:          inboxtest.DeliverTwice,
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- consumer.Run(ctx) }()

	// In an application the relay publishes what an outbox holds.
	m := driver.Message{ID: uuid.Must(uuid.NewV7()), Name: "order.placed", Body: []byte(`{"order":"A-1"}`)}
	broker.Publish(ctx, m, func(err error) { fmt.Println("published:", err) })
	if err := broker.Idle(ctx); err != nil {
		fmt.Println(err)
	}
	stop()
	fmt.Println("stopped:", <-ended)
	// Unordered output:
	// published: <nil>
	// invoice for A-1
	// stopped: <nil>
}

// A test of the handler on Postgres. Beside the invoices, Reset deletes the entry that says that the
// message is processed.
func ExampleProve() {
	var t *testing.T // that of your test

	pool := pgtest.New(t)
	// … Migrate, CREATE TABLE invoices …
	proof := txretrytest.Proof{
		Pool:  pool,
		Reset: "TRUNCATE invoices, holdfast_inbox",
		Rows:  []string{"SELECT order_id FROM invoices"},
	}
	m := inbox.Message{Name: "order.placed", Body: []byte(`{"order":"A-1"}`)}
	inboxtest.Prove(t, proof, m, func(pool *pgxpool.Pool) (inbox.Processor, error) {
		manager, err := txretry.New(pool, txretry.Config{})
		if err != nil {
			return nil, err
		}
		books, err := inboxpgx.New(manager, "billing", inboxpgx.Config{})
		if err != nil {
			return nil, err
		}
		return books, inboxpgx.Handle(books, "order.placed", func(ctx context.Context, tx pgx.Tx, o orderPlaced) error {
			_, err := tx.Exec(ctx, "INSERT INTO invoices (order_id) VALUES ($1)", o.Order)
			return err
		})
	})
}
