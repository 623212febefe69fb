package inboxtest_test

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/outbox/driver"
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
