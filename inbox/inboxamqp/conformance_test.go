package inboxamqp_test

import (
	"context"
	"testing"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestConsumer(t *testing.T) {
	t.Parallel()
	testenv.AMQPURL(t) // skips before there are subtests
	conformance.TestConsumer(t, conformance.ConsumerBackend{New: newConsumerFixture})
}

func newConsumerFixture(t *testing.T) conformance.ConsumerFixture {
	t.Helper()
	b := amqptest.New(t)
	b.Queue(t, "orders", nil)
	letters := newDeadLetters(t, b, config{})
	return conformance.ConsumerFixture{
		Start: func(t *testing.T, p inbox.Processor, cfg conformance.ConsumerConfig) func() {
			c := newConsumer(t, b.Dial, p, config{
				Queue: "orders", Concurrency: cfg.Concurrency, MaxBodyBytes: cfg.MaxBodyBytes, Retry: cfg.Retry, ShutdownTimeout: cfg.ShutdownTimeout,
			})
			if err := c.Setup(t.Context()); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
			ended := make(chan error, 1)
			go func() { ended <- c.Run(ctx) }()
			return func() {
				cancel()
				if err := <-ended; err != nil {
					t.Error(err)
				}
			}
		},
		Publish: func(t *testing.T, m *inbox.Message) {
			p := amqp.Publishing{Type: m.Name, ContentType: m.ContentType, DeliveryMode: amqp.Persistent, Body: m.Body}
			if m.ID != uuid.Nil {
				p.MessageId = m.ID.String()
			}
			b.Publish(t, "", "orders", p)
		},
		Letters: func(t *testing.T) []inbox.DeadLetter {
			found, err := letters.List(t.Context(), inbox.Filter{})
			if err != nil {
				t.Fatal(err)
			}
			return found
		},
	}
}
