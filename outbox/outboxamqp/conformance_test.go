package outboxamqp_test

import (
	"cmp"
	"context"
	"log/slog"
	"sync"
	"testing"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxtest/conformance"
)

func TestConformance(t *testing.T) {
	t.Parallel()
	testenv.AMQPURL(t) // skips before there are subtests
	conformance.TestPublisher(t, conformance.PublisherBackend{Open: func(t *testing.T) conformance.PublisherCase {
		b := amqptest.New(t)
		b.Queue(t, "order.placed", amqp.Table{"x-queue-type": "quorum"})
		proxy := testenv.NewProxy(t, b.URL)
		p, err := outboxamqp.NewPublisherWithWindow(through(proxy), outboxamqp.Config{Logger: slog.New(slog.DiscardHandler)}, 64)
		must(t, err)
		run(t, p)
		return conformance.PublisherCase{
			Publisher:  p,
			Received:   receiver(t, b, "order.placed"),
			Unroutable: message(t, "nowhere"),
			Break:      proxy.Cut,
			Fix:        proxy.Heal,
		}
	}})
}

// running returns a publisher whose Run ends with the test.
func running(t testing.TB, dial func(context.Context) (*amqp.Connection, error), cfg outboxamqp.Config) *outboxamqp.Publisher {
	t.Helper()
	p := newPublisher(t, dial, cfg)
	run(t, p)
	return p
}

func newPublisher(t testing.TB, dial func(context.Context) (*amqp.Connection, error), cfg outboxamqp.Config) *outboxamqp.Publisher {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	p, err := outboxamqp.NewPublisher(dial, cfg)
	must(t, err)
	return p
}

// through dials through a proxy.
func through(proxy *testenv.Proxy) func(context.Context) (*amqp.Connection, error) {
	return func(context.Context) (*amqp.Connection, error) { return amqp.Dial(proxy.URL()) }
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// run runs p until the end of the test.
func run(t testing.TB, p *outboxamqp.Publisher) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var run sync.WaitGroup
	run.Go(func() {
		if err := p.Run(ctx); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(func() {
		cancel()
		run.Wait()
	})
}

// receiver receives from the queue and returns all messages so far.
func receiver(t testing.TB, b *amqptest.Broker, queue string) func(context.Context) ([]driver.Message, error) {
	ch := b.Channel(t)
	var received []driver.Message
	return func(context.Context) ([]driver.Message, error) {
		for {
			d, found, err := ch.Get(queue, true)
			if err != nil || !found {
				return received, err
			}
			id, err := uuid.Parse(d.MessageId)
			if err != nil {
				return nil, err
			}
			m := driver.Message{ID: id, Name: d.Type, Body: d.Body, ContentType: cmp.Or(d.ContentType, "application/json"), Headers: map[string]string{}}
			for name, value := range d.Headers {
				m.Headers[name], _ = value.(string)
			}
			received = append(received, m)
		}
	}
}
