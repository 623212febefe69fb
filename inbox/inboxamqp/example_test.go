package inboxamqp_test

import (
	"context"
	"fmt"
	"os"
	"time"

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
	dial := inboxamqp.Dial(os.Getenv("AMQP_URL"), amqp.Config{})
	consumer, err := inboxamqp.NewConsumer(dial, inboxamqp.Queue{Name: "billing", Bindings: []inboxamqp.Binding{{Exchange: "shop", Key: "order.*"}}}, mux, inbox.ConsumerConfig{})
	if err != nil {
		fmt.Println(err)
		return
	}
	// A service calls consumer.Setup(ctx) first, and cancels ctx on shutdown.
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	fmt.Println(consumer.Run(ctx))
	// Output: <nil>
}

// An operator's tool replays messages that failed while a service was down. Its Consumer never runs.
func ExampleConsumer_DeadLetters() {
	dial := inboxamqp.Dial(os.Getenv("AMQP_URL"), amqp.Config{})
	consumer, err := inboxamqp.NewConsumer(dial, inboxamqp.Queue{Name: "billing"}, inbox.NewMux(), inbox.ConsumerConfig{})
	if err != nil {
		fmt.Println(err)
		return
	}
	filter := inbox.Filter{Name: "order.placed", ErrorContains: "payment service"}
	how := inbox.Replay{By: "ann", Reason: "the payment service is back", PerSecond: 50}
	replayed, err := consumer.DeadLetters().Replay(context.Background(), filter, how)
	fmt.Println(replayed.Returned, "returned", err)
}

// A doctor command prints the findings. Here no broker answers, so it finds only problems of the Config.
func ExampleConsumer_Check() {
	dial := inboxamqp.Dial("amqp://127.0.0.1:1/", amqp.Config{})
	consumer, err := inboxamqp.NewConsumer(dial, inboxamqp.Queue{Name: "billing"}, inbox.NewMux(), inbox.ConsumerConfig{HandlerTimeout: 20 * time.Minute})
	if err != nil {
		fmt.Println(err)
		return
	}
	err = consumer.Check(context.Background())
	if all, ok := err.(interface{ Unwrap() []error }); ok {
		for _, one := range all.Unwrap() {
			if finding, ok := one.(interface{ Fix() string }); ok {
				fmt.Println(finding.Fix())
			}
		}
	}
	// Output: lower ConsumerConfig.Prefetch or ConsumerConfig.HandlerTimeout
}
