package inboxnats_test

import (
	"context"

	"github.com/nats-io/nats.go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/modules/nats/inboxnats"
	"github.com/holdfast-go/holdfast/modules/nats/outboxnats"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

// The code of README.md, so that the compiler reads it too.

var _ = []any{publish, consume}

func publish(ctx context.Context, conn *nats.Conn, store *outboxpgx.Store) error {
	publisher, err := outboxnats.NewPublisher(conn, outboxnats.Config{Topic: "shop"}) // shop.order.placed and so on
	if err != nil {
		return err
	}
	relay, err := outbox.NewRelay(store, publisher, outbox.RelayConfig{})
	if err != nil {
		return err
	}
	return relay.Run(ctx)
}

func consume(ctx context.Context, conn *nats.Conn, billing inbox.Processor) error {
	consumer, err := inboxnats.NewConsumer(conn, inboxnats.Stream{Name: "shop"}, billing, inbox.ConsumerConfig{Name: "billing"})
	if err != nil {
		return err
	}
	if err := consumer.Setup(ctx); err != nil { // only where this process owns the stream
		return err
	}
	return consumer.Run(ctx)
}
