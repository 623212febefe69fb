package watermillbridge_test

import (
	"context"
	"log/slog"
	"os"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/tests"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
	watermillbridge "github.com/holdfast-go/holdfast/modules/watermill"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxredis"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// short is the form of Watermill's suite with every change. At night it sends more messages and tests subscribers that
// close again and again.
var short = os.Getenv(testenv.NightlyVar) != "1"

// oneByOne is the consumer of a subscription: Watermill expects the next message after an answer.
var oneByOne = inbox.ConsumerConfig{
	Concurrency: 1, Logger: slog.New(slog.DiscardHandler), ShutdownTimeout: testenv.Patience,
	Retry: inbox.RetryPolicy{BaseDelay: 50 * time.Millisecond},
}

// bridge returns both sides. The suite leaves some subscribers open.
func bridge(t *testing.T, to driver.Publisher, open func(string, inbox.Processor) (watermillbridge.Consumer, error)) (message.Publisher, message.Subscriber) {
	t.Helper()
	s := watermillbridge.NewSubscriber(open)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return watermillbridge.NewPublisher(watermillbridge.Direct(to)), s
}

// Watermill's own suite, on Redis Streams.
func TestRedisStreams(t *testing.T) {
	t.Parallel()
	options, err := redis.ParseURL(redistest.URL(t))
	if err != nil {
		t.Fatal(err)
	}
	options.PoolSize, options.ContextTimeoutEnabled = 500, true // one waits for each of many subscriptions
	client := redis.NewClient(options)
	t.Cleanup(func() {
		if err := client.Close(); err != nil {
			t.Error(err)
		}
	})
	to, err := outboxredis.NewPublisher(client, outboxredis.Config{
		Timeout: testenv.Patience,
		Router:  func(m outbox.Message) outbox.Route { return outbox.Route{Exchange: m.Name} },
	})
	if err != nil {
		t.Fatal(err)
	}
	inGroup := func(t *testing.T, group string) (message.Publisher, message.Subscriber) {
		t.Helper()
		return bridge(t, to, func(topic string, p inbox.Processor) (watermillbridge.Consumer, error) {
			return inboxredis.NewConsumer(client, topic, p, inboxredis.Config{Group: group, ConsumerConfig: oneByOne, Timeout: testenv.Patience})
		})
	}
	features := tests.Features{ForceShort: short, ConsumerGroups: true, GuaranteedOrder: true, GuaranteedOrderWithSingleSubscriber: true, Persistent: true}
	tests.TestPubSub(t, features, func(t *testing.T) (message.Publisher, message.Subscriber) { return inGroup(t, "suite") }, inGroup)
}

// Watermill's own suite, on RabbitMQ: a topic is a queue, so there are no groups.
func TestRabbitMQ(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	to, err := outboxamqp.NewPublisher(b.Dial, outboxamqp.Config{Timeout: testenv.Patience})
	if err != nil {
		t.Fatal(err)
	}
	ctx, end := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- to.Run(ctx) }()
	t.Cleanup(func() {
		end()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	open := func(t *testing.T) (message.Publisher, message.Subscriber) {
		t.Helper()
		return bridge(t, to, func(topic string, p inbox.Processor) (watermillbridge.Consumer, error) {
			return inboxamqp.NewConsumer(b.Dial, topic, p, inboxamqp.Config{ConsumerConfig: oneByOne, Timeout: testenv.Patience})
		})
	}
	features := tests.Features{ForceShort: short, GuaranteedOrder: true, GuaranteedOrderWithSingleSubscriber: true, Persistent: true}
	tests.TestPubSub(t, features, open, nil)
}
