//go:build interop

package main

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
	outbox "github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/format"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
)

// rabbit is a virtual host of RabbitMQ: exchanges orders and orders.failed, and queues for each side.
type rabbit struct{ *amqptest.Broker }

func newRabbit(t *testing.T) *rabbit {
	t.Helper()
	b := &rabbit{amqptest.New(t)}
	b.Exchange(t, "orders", "topic")
	b.Exchange(t, "orders.failed", "fanout")
	b.Queue(t, "orders.php", nil)
	b.Bind(t, "orders.php", "order.#", "orders")
	return b
}

func (b *rabbit) kind() string { return "amqp" }

func (b *rabbit) task() task { return task{"broker": "amqp", "dsn": b.URL} }

func (b *rabbit) dead() string { return "orders.go.failed.default" }

func (b *rabbit) publish(t *testing.T, form format.Symfony, msgs ...outbox.Message) {
	t.Helper()
	p, err := outboxamqp.NewPublisher(b.Dial, outboxamqp.Config{Exchange: "orders", Format: form})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = p.Run(ctx)
	}()
	defer func() {
		cancel()
		<-ended
	}()
	for _, m := range msgs {
		done := make(chan error, 1)
		p.Publish(ctx, m, func(err error) { done <- err })
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
}

func (b *rabbit) consume(t *testing.T, place string, form format.Symfony, handle func(*inbox.Message) error) {
	t.Helper()
	c, err := inboxamqp.NewConsumer(b.Dial, place+".go", processor(handle), inboxamqp.Config{
		ConsumerConfig: consumerConfig(), Bindings: []inboxamqp.Binding{{Exchange: place, Key: "#"}}, Classic: true, Format: form,
	})
	if err != nil {
		t.Fatal(err)
	}
	start(t, c)
}

func (b *rabbit) tap(t *testing.T, place string) func() []fixture {
	t.Helper()
	queue := place + ".tap." + strings.ToLower(t.Name()[strings.LastIndexByte(t.Name(), '/')+1:])
	b.Queue(t, queue, nil)
	b.Bind(t, queue, "#", place)
	return func() []fixture { return b.take(t, queue) }
}

func (b *rabbit) waiting(t *testing.T) []fixture { return b.take(t, "orders.php") }

// take returns what lies in a queue, and leaves it there.
func (b *rabbit) take(t *testing.T, queue string) (seen []fixture) {
	t.Helper()
	ch := b.Channel(t)
	defer func() { _ = ch.Close() }() // returns the messages
	for {
		d, found, err := ch.Get(queue, false)
		if err != nil {
			t.Fatal(err)
		}
		if !found {
			return seen
		}
		properties := map[string]any{}
		for name, value := range map[string]string{
			"message_id": d.MessageId, "type": d.Type, "content_type": d.ContentType, "content_encoding": d.ContentEncoding, "app_id": d.AppId,
			"correlation_id": d.CorrelationId, "reply_to": d.ReplyTo, "expiration": d.Expiration,
		} {
			if value != "" {
				properties[name] = value
			}
		}
		properties["delivery_mode"] = d.DeliveryMode
		if !d.Timestamp.IsZero() {
			properties["timestamp"] = d.Timestamp.Unix()
		}
		seen = append(seen, fixture{Properties: properties, Headers: plain(d.Headers).(map[string]any), Body: string(d.Body)})
	}
}

// plain has only types that JSON has.
func plain(v any) any {
	switch v := v.(type) {
	case amqp.Table:
		all := map[string]any{}
		for name, value := range v {
			all[name] = plain(value)
		}
		return all
	case []any:
		all := make([]any, len(v))
		for i, value := range v {
			all[i] = plain(value)
		}
		return all
	case time.Time:
		return v.UTC().Format(time.RFC3339)
	}
	return v
}

// consumer is what our consumers have in common.
type consumer interface {
	Setup(ctx context.Context) error
	Run(ctx context.Context) error
	Ready(ctx context.Context) error
}

func consumerConfig() inbox.ConsumerConfig {
	return inbox.ConsumerConfig{
		Name: "go", Logger: slog.New(slog.DiscardHandler), Concurrency: 1,
		Retry: inbox.RetryPolicy{MaxAttempts: 3, BaseDelay: 200 * time.Millisecond, Multiplier: 1, MaxDelay: 200 * time.Millisecond},
	}
}

// start runs a consumer until the test ends.
func start(t *testing.T, c consumer) {
	t.Helper()
	if err := c.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	testenv.Eventually(t, func() error { return c.Ready(ctx) })
}

// processor gives each message to a function.
type processor func(*inbox.Message) error

func (p processor) Process(_ context.Context, msgs []*inbox.Message) []error {
	errs := make([]error, len(msgs))
	for i, m := range msgs {
		errs[i] = p(m)
	}
	return errs
}
