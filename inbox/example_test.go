package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
)

type OrderPlaced struct {
	Order string `json:"order"`
}

// A handler gets the decoded body. Its error decides about the message: here an unrecoverable one becomes a
// dead letter at once, and the others are processed.
func Example() {
	mux := inbox.NewMux()
	err := inbox.Handle(mux, "order.placed", func(_ context.Context, o OrderPlaced) error {
		if o.Order == "" {
			return inbox.Unrecoverable(errors.New("order has no number"))
		}
		fmt.Println("handled order", o.Order)
		return nil
	})
	if err != nil {
		fmt.Println(err)
		return
	}

	// In production the consumer is inboxamqp.NewConsumer, on RabbitMQ.
	broker := inboxtest.NewBroker()
	consumer, err := inboxtest.NewConsumer(broker, inboxtest.Queue{Name: "billing"}, mux, inbox.ConsumerConfig{Concurrency: 1, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- consumer.Run(ctx) }()

	for _, body := range []string{`{"order":"A-1"}`, `{}`, `{"order":"A-2"}`, `not JSON`} {
		m := &inbox.Message{ID: uuid.Must(uuid.NewV7()), Name: "order.placed", Body: []byte(body)}
		if err := broker.Send(ctx, m); err != nil {
			fmt.Println(err)
		}
	}
	if err := broker.Idle(ctx); err != nil {
		fmt.Println(err)
	}
	dead, _ := consumer.DeadLetters().List(ctx, inbox.Filter{})
	for _, d := range dead {
		fmt.Printf("%s: %s\n", d.Class, d.Error)
	}
	cancel()
	fmt.Println("stopped:", <-done)
	// Output:
	// handled order A-1
	// handled order A-2
	// unrecoverable: order has no number
	// validation: inbox: decode inbox_test.OrderPlaced: malformed JSON at byte 2
	// stopped: <nil>
}
