package inboxamqp

import (
	"context"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// Tuning is what only tests set; zero fields change nothing.
type Tuning struct {
	MaxBodyBytes   int
	ConfirmTimeout time.Duration
	Copies         func(context.Context) (*amqp.Connection, error) // dials the connection for copies
	Leveling       time.Duration
}

// NewTuned is NewConsumer with a Tuning.
func NewTuned(dial func(context.Context) (*amqp.Connection, error), queue Queue, p inbox.Processor, cfg inbox.ConsumerConfig, t Tuning) (*Consumer, error) {
	return newConsumer(dial, queue, p, cfg, tuning{t.MaxBodyBytes, t.ConfirmTimeout, t.Copies, t.Leveling})
}

// SourceOf is a source of the queue of a consumer.
func SourceOf(c *Consumer) driver.Source { return newSource(c.source.dial, c.cfg) }

// PartsOf are sources of the partitions of a consumer, as of other programs.
func PartsOf(c *Consumer) (all []driver.Source) {
	for _, queue := range c.cfg.read() {
		all = append(all, newSource(c.source.dial, c.cfg).of(queue))
	}
	return all
}

// LettersOf are the dead letters of a consumer as its transport keeps them.
func LettersOf(c *Consumer) driver.DeadLetters { return c.source.DeadLetters() }
