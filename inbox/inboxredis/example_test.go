package inboxredis_test

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
)

func ExampleNewProcessor() {
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:6379"})
	defer client.Close()

	mux := inbox.NewMux()
	err := inbox.Handle(mux, "order.placed", func(_ context.Context, o struct {
		Order string `json:"order"`
	},
	) error {
		fmt.Println("mail about", o.Order)
		return nil
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	p, err := inboxredis.NewProcessor(client, mux, inboxredis.ProcessorConfig{Namespace: "mailer"})
	if err != nil {
		fmt.Println(err)
		return
	}
	var _ inbox.Processor = p // ready for a consumer, such as inboxamqp.NewConsumer
	fmt.Println("ready")
	// Output: ready
}

func ExampleNewConsumer() {
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:6379", ContextTimeoutEnabled: true})
	defer client.Close()

	mux := inbox.NewMux()
	err := inbox.Handle(mux, "order.placed", func(_ context.Context, o struct {
		Order string `json:"order"`
	},
	) error {
		fmt.Println("mail about", o.Order)
		return nil
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	consumer, err := inboxredis.NewConsumer(client, inboxredis.Stream{Name: "orders"}, mux, inbox.ConsumerConfig{Name: "mailer", Concurrency: 16})
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx, stop := context.WithCancel(context.Background())
	stop() // a program ends it on a signal
	if err := consumer.Run(ctx); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("stopped")
	// Output: stopped
}
