package outboxkafka_test

import (
	"context"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/holdfast-go/holdfast/modules/kafka/outboxkafka"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// The code of README.md, so that the compiler reads it too.

var _ = run

func run(ctx context.Context, store driver.Source) error {
	client, err := kgo.NewClient(kgo.SeedBrokers("localhost:9092"), kgo.AllowIdempotentProduceCancellation())
	if err != nil {
		return err
	}
	publisher, err := outboxkafka.NewPublisher(client, outboxkafka.Config{Topic: "shop"})
	if err != nil {
		return err
	}
	relay, err := outbox.NewRelay(store, publisher, outbox.RelayConfig{})
	if err != nil {
		return err
	}
	return relay.Run(ctx)
}
