package main

import (
	"context"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/messages"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxredis"
)

// The brokers.
const (
	brokerRabbitMQ = "rabbitmq"
	brokerRedis    = "redis"
)

// trialWorkers is how many messages a consumer with -trials has in hand.
const trialWorkers = 8

// consumer is what the shop uses of a consumer, whatever its broker.
type consumer interface {
	runner
	Setup(ctx context.Context) error
	Check(ctx context.Context) error
	DeadLetters() inbox.DeadLetters
	Stats(ctx context.Context) (inbox.Stats, error)
}

// broker carries the messages of the shop.
type broker struct {
	publisher driver.Publisher
	consumer  consumer
	setup     []func(context.Context) error
}

// newBroker puts the parts of a broker together. On Redis the messages are in a stream, which one
// consumer group reads. h counts the messages.
func newBroker(cfg config, s *servers, p inbox.Processor, h *handled) broker {
	common := inbox.ConsumerConfig{Name: messages.Queue, Batch: 50, ShutdownTimeout: stopTimeout - closeTimeout}
	if cfg.trials { // messages of a slow consumer wait where one sees them, at the broker
		common.Batch, common.Concurrency, common.Prefetch = 1, trialWorkers, trialWorkers
	}
	if cfg.broker == brokerRedis {
		consumer := must(inboxredis.NewConsumer(s.redis, messages.Exchange, p, inboxredis.Config{ConsumerConfig: common}))
		return broker{
			publisher: countedRedis{must(outboxredis.NewPublisher(s.redis, outboxredis.Config{Stream: messages.Exchange})), h},
			consumer:  consumer, setup: []func(context.Context) error{consumer.Setup},
		}
	}
	publisher := must(outboxamqp.NewPublisher(s.dial, outboxamqp.Config{Exchange: messages.Exchange}))
	consumer := must(inboxamqp.NewConsumer(s.dial, messages.Queue, p, inboxamqp.Config{
		ConsumerConfig: common,
		Bindings:       []inboxamqp.Binding{{Exchange: messages.Exchange, Key: messages.Binding}},
	}))
	return broker{publisher: countedAMQP{publisher, h}, consumer: consumer, setup: []func(context.Context) error{publisher.Setup, consumer.Setup}}
}
