package inboxamqp

import (
	"context"
	"fmt"
	"strconv"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/partition"
)

// The types of queues, as the argument x-queue-type names them.
const (
	quorum  = "quorum"
	classic = "classic"
)

// singleActive is the argument of a queue that serves one consumer at a time.
const singleActive = "x-single-active-consumer"

// retryQueue is the name of the queue that holds messages of a queue for a delay.
func retryQueue(queue string, delay time.Duration) string {
	return queue + ".retry." + strconv.FormatInt(delay.Milliseconds(), 10)
}

// queueSpec is a queue the consumer needs.
type queueSpec struct {
	name string
	args amqp.Table
}

// queueType is the type of the queues that Setup declares.
func (s *settings) queueType() string {
	if s.Classic {
		return classic
	}
	return quorum
}

// queues returns all queues the consumer needs, its own first.
func (s *settings) queues() []queueSpec {
	specs := s.ownQueues()
	for _, delay := range driver.Steps(s.Retry) {
		args := s.back()
		args["x-message-ttl"] = delay.Milliseconds()
		if !s.Classic {
			// The message stays here until the queue it returns to has taken it.
			args["x-dead-letter-strategy"] = "at-least-once"
			args["x-overflow"] = "reject-publish"
		}
		specs = append(specs, queueSpec{retryQueue(s.queue, delay), args})
	}
	for _, class := range driver.AllClasses(s.Classes) {
		specs = append(specs, queueSpec{driver.DeadLetterQueue(s.DeadLetterPrefix, class), amqp.Table{}})
	}
	return specs
}

// ownQueues are those that the consumer reads.
func (s *settings) ownQueues() (specs []queueSpec) {
	if s.partitioned() {
		for _, name := range partition.Names(s.queue, s.Partitions) {
			specs = append(specs, queueSpec{name, amqp.Table{singleActive: true}})
		}
		return append(specs, queueSpec{s.members(), amqp.Table{}})
	}
	own := amqp.Table{}
	if s.Ordered {
		own[singleActive] = true
	}
	return []queueSpec{{s.queue, own}}
}

// back has a retry queue return its messages. Those of a partition keep their routes, and so their slot.
func (s *settings) back() amqp.Table {
	if s.partitioned() {
		return amqp.Table{"x-dead-letter-exchange": s.queue}
	}
	return amqp.Table{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": s.queue}
}

// queueArgs completes the arguments of a queue of that type for the broker's version.
func queueArgs(conn *amqpconn.Conn, kind string, args amqp.Table) amqp.Table {
	args["x-queue-type"] = kind
	if kind == quorum && conn.ServerMajor() >= 4 {
		// RabbitMQ 4 drops a message that was returned 20 times. Older ones have no
		// such limit, and do not know this value.
		args["x-delivery-limit"] = int32(-1)
	}
	return args
}

// Setup declares what is missing of the queue or its partitions, its retry queues, the dead-letter
// queues and the exchanges of Config.Bindings, and makes the bindings. All are durable; the exchanges
// are of type topic. What exists is used as it is. Setup may be called any number of times, by many
// processes at once, before or after the Setup of a publisher to the same exchange.
//
// With Config.Partitions it fails where queues or exchanges of another number of partitions exist: they
// would go on taking messages. See "Partitions" in the package's doc.
func (c *Consumer) Setup(ctx context.Context) error {
	err := amqpconn.Use(ctx, c.source.dial, c.cfg.Timeout, func(conn *amqpconn.Conn) error {
		if err := c.cfg.declareSlots(conn); err != nil {
			return err
		}
		for _, spec := range c.cfg.queues() {
			if err := declareQueue(conn, spec, c.cfg.queueType()); err != nil {
				return fmt.Errorf("queue %q: %w", spec.name, err)
			}
		}
		if err := c.cfg.bindPartitions(conn); err != nil {
			return err
		}
		for _, b := range c.cfg.Bindings {
			if err := declareExchange(conn, b.Exchange); err != nil {
				return fmt.Errorf("exchange %q: %w", b.Exchange, err)
			}
			if err := c.cfg.bind(conn, b); err != nil {
				return fmt.Errorf("binding to exchange %q by %q: %w", b.Exchange, b.Key, err)
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("inboxamqp: setup: %w", err)
	}
	return nil
}

func declareQueue(conn *amqpconn.Conn, spec queueSpec, kind string) error {
	return declare(func() (bool, error) { return conn.QueueExists(spec.name) }, func() error {
		return conn.Try(func(ch *amqp.Channel) error {
			_, err := ch.QueueDeclare(spec.name, true, false, false, false, queueArgs(conn, kind, spec.args))
			return err
		})
	})
}

func declareExchange(conn *amqpconn.Conn, name string) error {
	return declare(func() (bool, error) { return conn.ExchangeExists(name) }, func() error {
		return conn.Try(func(ch *amqp.Channel) error {
			return ch.ExchangeDeclare(name, amqp.ExchangeTopic, true, false, false, false, nil)
		})
	})
}

// declare makes what does not exist. Another process may do so meanwhile, with other arguments:
// that one wins.
func declare(exists func() (bool, error), create func() error) error {
	if there, err := exists(); there || err != nil {
		return err
	}
	err := create()
	if err == nil {
		return nil
	}
	if there, _ := exists(); there {
		return nil
	}
	return err
}
