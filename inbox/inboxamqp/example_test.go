package inboxamqp_test

import (
	"context"
	"fmt"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
)

func ExampleNewConsumer() {
	type orderPlaced struct {
		Order string `json:"order"`
	}
	mux := inbox.NewMux()
	err := inbox.Handle(mux, "order.placed", func(_ context.Context, o orderPlaced) error {
		fmt.Println("placed:", o.Order)
		return nil
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	dial := func(context.Context) (*amqp.Connection, error) { return amqp.Dial("amqp://localhost/") }
	consumer, err := inboxamqp.NewConsumer(dial, mux, inboxamqp.Config{
		Queue:    "orders",
		Bindings: []inboxamqp.Binding{{Exchange: "events", Key: "order.*"}},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // a service would cancel it when it is told to stop
	fmt.Println(consumer.Run(ctx))
	// Output: <nil>
}

func ExampleDeadLetters_Replay() {
	dial := func(context.Context) (*amqp.Connection, error) { return amqp.Dial("amqp://localhost/") }
	letters, err := inboxamqp.NewDeadLetters(dial, inboxamqp.DeadLettersConfig{})
	if err != nil {
		fmt.Println(err)
		return
	}
	n, err := letters.Replay(context.Background(), inbox.Filter{Name: "order.placed"}, inbox.Replay{By: "ops", Reason: "the payment service is back", PerSecond: 50})
	fmt.Println(n.Returned, "returned to their queues", err)
}
