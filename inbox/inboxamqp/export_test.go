package inboxamqp

import (
	"context"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// Tuning contains values that only tests set; zero fields change nothing.
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

// SourceOf returns a source of a consumer's queue.
func SourceOf(c *Consumer) driver.Source { return newSource(c.source.dial, c.cfg) }

// PartsOf returns sources of a consumer's partitions, as in other processes.
func PartsOf(c *Consumer) (all []driver.Source) {
	for _, queue := range c.cfg.read() {
		all = append(all, newSource(c.source.dial, c.cfg).of(queue))
	}
	return all
}

// LettersOf returns the dead letters of a consumer as its transport stores them.
func LettersOf(c *Consumer) driver.DeadLetters { return c.source.DeadLetters() }
