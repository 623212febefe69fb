package watermillbridge_test

import (
	"context"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	watermillbridge "github.com/holdfast-go/holdfast/modules/watermill"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxredis"
)

// The code of README.md, compiled.

var _ = []any{inTransaction, direct, subscribe}

func inTransaction(tx pgx.Tx, store *outboxpgx.Store, order *message.Message) error {
	publisher := watermillbridge.NewPublisher(func(ctx context.Context, m outbox.Message) error {
		return store.Write(ctx, tx, m) // commits with the data; the relay publishes
	})
	return publisher.Publish("order.placed", order)
}

func direct(client *redis.Client) (message.Publisher, error) {
	streams, err := outboxredis.NewPublisher(client, outboxredis.Config{
		Router: func(m outbox.Message) outbox.Route { return outbox.Route{Exchange: m.Name} }, // a stream for each topic
	})
	if err != nil {
		return nil, err
	}
	return watermillbridge.NewPublisher(watermillbridge.Direct(streams)), nil
}

func subscribe(client *redis.Client) message.Subscriber {
	return watermillbridge.NewSubscriber(func(topic string, p inbox.Processor) (watermillbridge.Consumer, error) {
		return inboxredis.NewConsumer(client, inboxredis.Stream{Name: topic}, p, inbox.ConsumerConfig{
			Name: "billing", Concurrency: 1, // one message in flight, in order
		})
	})
}
