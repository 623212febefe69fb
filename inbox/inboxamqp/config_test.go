package inboxamqp_test

import (
	"cmp"
	"context"
	"log/slog"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/format"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
)

// config is all that tests set of a consumer, flat: its queue, its Config, what its processor tells
// about itself, and what only tests set.
type config struct {
	Queue string // Default: orders.

	Name                               string
	Concurrency, Batch, Prefetch       int
	MaxCrashes, MessageLimit           int
	HandlerTimeout, TimeLimit, Timeout time.Duration
	ShutdownTimeout                    time.Duration
	Retry                              inbox.RetryPolicy
	DeadLetterPrefix                   string
	Classes                            []string
	Bindings                           []inboxamqp.Binding
	Classic, Ordered                   bool
	Partitions                         int
	Format                             format.Format
	Logger                             *slog.Logger

	Ledger    driver.Ledger // of the processor
	Retention time.Duration // of the processor

	ConfirmTimeout time.Duration
	Leveling       time.Duration
}

func (c config) public() inboxamqp.Config {
	return inboxamqp.Config{
		ConsumerConfig: inbox.ConsumerConfig{
			Name: c.Name, Concurrency: c.Concurrency, Batch: c.Batch, Prefetch: c.Prefetch, HandlerTimeout: c.HandlerTimeout,
			MaxCrashes: c.MaxCrashes, Retry: c.Retry, DeadLetterPrefix: c.DeadLetterPrefix, Classes: c.Classes,
			TimeLimit: c.TimeLimit, MessageLimit: c.MessageLimit, ShutdownTimeout: c.ShutdownTimeout,
			Logger: cmp.Or(c.Logger, slog.New(slog.DiscardHandler)), Ordered: c.Ordered,
		},
		Bindings: c.Bindings, Classic: c.Classic, Partitions: c.Partitions, Format: c.Format, Timeout: c.Timeout,
	}
}

// remembering is a processor that remembers what it has processed, as far as the consumer can tell.
type remembering struct {
	inbox.Processor
	ledger    driver.Ledger
	retention time.Duration
}

func (r remembering) Ledger() driver.Ledger    { return r.ledger }
func (r remembering) Retention() time.Duration { return r.retention }

func newConsumer(t *testing.T, dial func(context.Context) (*amqp.Connection, error), p inbox.Processor, cfg config) *inboxamqp.Consumer {
	t.Helper()
	if cfg.Ledger != nil || cfg.Retention != 0 {
		p = remembering{p, cfg.Ledger, cmp.Or(cfg.Retention, driver.DefaultRetention)}
	}
	c, err := inboxamqp.NewTuned(dial, cmp.Or(cfg.Queue, "orders"), p, cfg.public(),
		inboxamqp.Tuning{ConfirmTimeout: cfg.ConfirmTimeout, Leveling: cfg.Leveling})
	must(t, err)
	return c
}
