package outboxamqp_test

import (
	"context"
	"fmt"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
)

func ExampleNewPublisher() {
	ctx := context.Background()
	dial := outboxamqp.Dial("amqp://localhost/", amqp.Config{})
	publisher, err := outboxamqp.NewPublisher(dial, outboxamqp.Config{
		Exchange: "events",
		Routes: map[string]outbox.Route{
			"invoice.sent": {RoutingKey: "billing.invoice.sent"},
		},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	cancel() // a service would cancel it on shutdown
	fmt.Println(publisher.Run(ctx))
	// Output: <nil>
}
