package inboxamqp

import (
	"context"
	"fmt"
	"strconv"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
)

// retryQueue is the name of the queue that holds messages of a queue for a delay.
func retryQueue(queue string, delay time.Duration) string {
	return queue + ".retry." + strconv.FormatInt(delay.Milliseconds(), 10)
}

// queueSpec is a queue the consumer needs.
type queueSpec struct {
	name string
	args amqp.Table
}

// queues returns all queues the consumer needs, its own first.
func (c *Consumer) queues() []queueSpec {
	specs := []queueSpec{{c.cfg.Queue, amqp.Table{}}}
	for _, delay := range driver.Steps(c.cfg.Retry) {
		args := amqp.Table{
			"x-message-ttl":             delay.Milliseconds(),
			"x-dead-letter-exchange":    "",
			"x-dead-letter-routing-key": c.cfg.Queue,
		}
		if c.cfg.QueueType == Quorum {
			// The message stays here until the queue it returns to has taken it.
			args["x-dead-letter-strategy"] = "at-least-once"
			args["x-overflow"] = "reject-publish"
		}
		specs = append(specs, queueSpec{retryQueue(c.cfg.Queue, delay), args})
	}
	for _, class := range driver.AllClasses(c.cfg.Classes) {
		specs = append(specs, queueSpec{driver.DeadLetterQueue(c.cfg.DeadLetterPrefix, class), amqp.Table{}})
	}
	return specs
}

// queueArgs completes the arguments of a queue of that type for the broker's version.
func queueArgs(conn *amqpconn.Conn, kind QueueType, args amqp.Table) amqp.Table {
	args["x-queue-type"] = string(kind)
	if kind == Quorum && conn.ServerMajor() >= 4 {
		// RabbitMQ 4 drops a message that was returned 20 times. Older ones have no
		// such limit, and do not know this value.
		args["x-delivery-limit"] = int32(-1)
	}
	return args
}

// Setup declares what is missing of the queue, its retry queues and the dead-letter queues,
// all durable and of Config.QueueType, and makes Config.Bindings. Queues that exist are
// used as they are. The exchanges of the bindings must exist.
func (c *Consumer) Setup(ctx context.Context) error {
	err := amqpconn.Use(ctx, c.dial, c.cfg.CallTimeout, func(conn *amqpconn.Conn) error {
		for _, spec := range c.queues() {
			if err := c.declare(conn, spec); err != nil {
				return fmt.Errorf("queue %q: %w", spec.name, err)
			}
		}
		for _, b := range c.cfg.Bindings {
			if err := conn.Try(func(ch *amqp.Channel) error {
				return ch.QueueBind(c.cfg.Queue, b.Key, b.Exchange, false, nil)
			}); err != nil {
				return fmt.Errorf("binding to exchange %q by %q: %w", b.Exchange, b.Key, explain(err))
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("inboxamqp: setup: %w", err)
	}
	return nil
}

// explain says what to do about an exchange that does not exist.
func explain(err error) error {
	if amqpconn.IsNotFound(err) {
		return fmt.Errorf("declare the exchange first, for example by outboxamqp.Publisher.Setup: %w", err)
	}
	return err
}

func (c *Consumer) declare(conn *amqpconn.Conn, spec queueSpec) error {
	if exists, err := conn.QueueExists(spec.name); exists || err != nil {
		return err
	}
	err := conn.Try(func(ch *amqp.Channel) error {
		_, err := ch.QueueDeclare(spec.name, true, false, false, false, queueArgs(conn, c.cfg.QueueType, spec.args))
		return err
	})
	if err == nil {
		return nil
	}
	// Another process may have declared it meanwhile, with other arguments.
	if exists, _ := conn.QueueExists(spec.name); exists {
		return nil
	}
	return err
}
