package inboxtest_test

import (
	"context"
	"log/slog"
	"testing"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
)

func TestConsumer(t *testing.T) {
	t.Parallel()
	conformance.TestConsumer(t, conformance.ConsumerBackend{Bubble: true, New: func(t *testing.T) conformance.ConsumerFixture {
		broker := inboxtest.NewBroker()
		newConsumer := func(p inbox.Processor, cfg conformance.ConsumerConfig) *inboxtest.Consumer {
			c, err := inboxtest.NewConsumer(broker, "inbox", p, inboxtest.Config{ConsumerConfig: inbox.ConsumerConfig{
				Concurrency: cfg.Concurrency, Retry: cfg.Retry, ShutdownTimeout: cfg.ShutdownTimeout, Logger: slog.New(slog.DiscardHandler),
			}})
			if err != nil {
				t.Fatal(err)
			}
			c.SetMaxBody(cfg.MaxBodyBytes)
			return c
		}
		operator := newConsumer(inbox.NewMux(), conformance.ConsumerConfig{}) // declares the queue, and never runs
		return conformance.ConsumerFixture{
			Start: func(t *testing.T, p inbox.Processor, cfg conformance.ConsumerConfig) func() {
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan error, 1)
				consumer := newConsumer(p, cfg)
				go func() { ended <- consumer.Run(ctx) }()
				return func() {
					cancel()
					if err := <-ended; err != nil {
						t.Error(err)
					}
				}
			},
			Publish: func(t *testing.T, m *inbox.Message) {
				if err := broker.Send(t.Context(), m); err != nil {
					t.Fatal(err)
				}
			},
			Letters: func(t *testing.T) []inbox.DeadLetter { return letters(t, rig{broker, operator}, inbox.Filter{}) },
		}
	}})
}
