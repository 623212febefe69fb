package inboxtest_test

import (
	"context"
	"log/slog"
	"testing"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
)

// swappable is a Processor that can be replaced, as a broker's cannot.
type swappable struct{ inbox.Processor }

func TestConsumer(t *testing.T) {
	t.Parallel()
	conformance.TestConsumer(t, conformance.ConsumerBackend{Bubble: true, New: func(t *testing.T) conformance.ConsumerFixture {
		var queue []*inbox.Message // published before the first start
		var broker *inboxtest.Broker
		current := &swappable{}
		return conformance.ConsumerFixture{
			Start: func(t *testing.T, p inbox.Processor, cfg conformance.ConsumerConfig) func() {
				current.Processor = p
				if broker == nil {
					var err error
					broker, err = inboxtest.NewBroker(current, inboxtest.Config{
						Concurrency: cfg.Concurrency, MaxBodyBytes: cfg.MaxBodyBytes, Retry: cfg.Retry, ShutdownTimeout: cfg.ShutdownTimeout,
						Logger: slog.New(slog.DiscardHandler),
					})
					if err != nil {
						t.Fatal(err)
					}
					for _, m := range queue {
						if err := broker.Publish(t.Context(), m); err != nil {
							t.Fatal(err)
						}
					}
				}
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan error, 1)
				go func() { ended <- broker.Run(ctx) }()
				return func() {
					cancel()
					if err := <-ended; err != nil {
						t.Error(err)
					}
				}
			},
			Publish: func(t *testing.T, m *inbox.Message) {
				if broker == nil {
					queue = append(queue, m)
					return
				}
				if err := broker.Publish(t.Context(), m); err != nil {
					t.Fatal(err)
				}
			},
			Letters: func(t *testing.T) []inbox.DeadLetter { return letters(t, broker, inbox.Filter{}) },
		}
	}})
}
