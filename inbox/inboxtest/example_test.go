package inboxtest_test

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/pgtest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

type orderPlaced struct {
	Order string `json:"order"`
}

// A production handler on the fakes: the broker delivers every message twice, and its effect happens once.
func Example() {
	billing, err := inboxtest.New(txretrytest.New(txretrytest.Config{}), "billing", inboxpgx.Config{})
	if err != nil {
		fmt.Println(err)
		return
	}
	err = inboxpgx.Handle(billing, "order.placed", func(_ context.Context, _ pgx.Tx, o orderPlaced) error {
		fmt.Println("invoice for", o.Order)
		return nil
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	broker := inboxtest.NewBroker()
	consumer, err := inboxtest.NewConsumer(broker, inboxtest.Queue{Name: "billing", Names: []string{"order.*"}, Fault: inboxtest.DeliverTwice}, billing, inbox.ConsumerConfig{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- consumer.Run(ctx) }()

	// In an application the relay publishes the messages of an outbox.
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

// A test of the handler on Postgres. Besides the invoices, Reset deletes the entry of the processed message.
func ExampleProve() {
	var t *testing.T // of your test

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
		billing, err := inboxpgx.New(manager, "billing", inboxpgx.Config{})
		if err != nil {
			return nil, err
		}
		return billing, inboxpgx.Handle(billing, "order.placed", func(ctx context.Context, tx pgx.Tx, o orderPlaced) error {
			_, err := tx.Exec(ctx, "INSERT INTO invoices (order_id) VALUES ($1)", o.Order)
			return err
		})
	})
}

// Slow work has a queue of its own: the handler of the quick queue writes a message for it, in its own
// transaction. All orders are billed while the first report is still being made.
func Example_slowQueue() {
	if err := slowQueue(context.Background(), 100); err != nil {
		fmt.Println(err)
	}
	// Output:
	// all billed, reports done: 0
	// reports done: 100
}

func slowQueue(ctx context.Context, orders int) error {
	manager, store, broker := txretrytest.New(txretrytest.Config{}), outboxtest.New(), inboxtest.NewBroker()
	relay, err := outbox.NewRelay(store, broker, outbox.RelayConfig{})
	if err != nil {
		return err
	}
	var billed, made sync.WaitGroup
	billed.Add(orders)
	made.Add(orders)
	billing, err := inboxtest.New(manager, "billing", inboxpgx.Config{})
	if err != nil {
		return err
	}
	err = inboxpgx.Handle(billing, "order.placed", func(ctx context.Context, tx pgx.Tx, o orderPlaced) error {
		m, err := outbox.NewMessage("report.requested", o)
		if err != nil {
			return err
		}
		txretry.AfterCommit(tx, billed.Done)
		return store.Write(ctx, tx, m)
	})
	if err != nil {
		return err
	}
	paper := make(chan struct{}) // the reports wait for it
	var reports atomic.Int64
	mux := inbox.NewMux()
	err = inbox.Handle(mux, "report.requested", func(context.Context, orderPlaced) error {
		<-paper
		reports.Add(1)
		made.Done()
		return nil
	})
	if err != nil {
		return err
	}
	quick, err := inboxtest.NewConsumer(broker, inboxtest.Queue{Name: "billing", Names: []string{"order.*"}}, billing, inbox.ConsumerConfig{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	slow, err := inboxtest.NewConsumer(broker, inboxtest.Queue{Name: "billing.reports", Names: []string{"report.*"}}, mux, inbox.ConsumerConfig{Concurrency: 2, Prefetch: 2, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	var running sync.WaitGroup
	defer running.Wait()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	for _, run := range []func(context.Context) error{relay.Run, quick.Run, slow.Run} {
		running.Go(func() { _ = run(ctx) })
	}
	for i := range orders {
		err := manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
			m, err := outbox.NewMessage("order.placed", orderPlaced{Order: fmt.Sprint(i)})
			if err != nil {
				return err
			}
			return store.Write(ctx, tx, m)
		})
		if err != nil {
			return err
		}
	}
	billed.Wait()
	fmt.Println("all billed, reports done:", reports.Load())
	close(paper)
	made.Wait()
	fmt.Println("reports done:", reports.Load())
	return nil
}
