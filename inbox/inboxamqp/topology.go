package inboxamqp

import (
	"context"
	"fmt"
	"maps"
	"slices"

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

// unlimited is a delivery limit that no message reaches. A quorum queue drops a message that was returned more
// often than its limit, which is 20 on RabbitMQ 4 where none is declared. All versions keep this value: -1, which
// means no limit on RabbitMQ 4, drops messages at once on older ones.
const unlimited = 1_000_000_000

// queueSpec is a queue the consumer needs.
type queueSpec struct {
	name string
	kind string // quorum or classic
	use  use
	args amqp.Table
}

// use is the purpose of a queue. It says which arguments Check compares.
type use int

const (
	own    use = iota + 1 // the consumer reads it
	dead                  // it has dead letters
	noted                 // it counts messages that wait
	shared                // all consumers of the vhost share it
)

// table are all arguments of the queue.
func (q queueSpec) table(kind string) amqp.Table {
	args := maps.Clone(q.args)
	args["x-queue-type"] = kind
	if kind == quorum {
		args["x-delivery-limit"] = int64(unlimited)
	}
	return args
}

func (q queueSpec) declare(ch *amqp.Channel) error {
	_, err := ch.QueueDeclare(q.name, true, false, false, false, q.table(q.kind))
	return err
}

// queueType is the type of the consumer's own queues.
func (s *settings) queueType() string {
	if s.Classic {
		return classic
	}
	return quorum
}

// queues returns all queues the consumer needs, its own first.
func (s *settings) queues() []queueSpec {
	specs := s.ownQueues()
	for _, class := range s.places() {
		specs = append(specs, queueSpec{driver.DeadLetterQueue(s.DeadLetterPrefix, class), s.queueType(), dead, amqp.Table{}})
	}
	return slices.Concat(specs, s.noteQueues(), sharedQueues())
}

// read are the names of the queues that the consumer reads.
func (s *settings) read() []string {
	if s.partitioned() {
		return partition.Names(s.queue, s.Partitions)
	}
	return []string{s.queue}
}

// ownQueues are those that the consumer reads, and the one by which processes are counted.
func (s *settings) ownQueues() (specs []queueSpec) {
	for _, name := range s.read() {
		args := amqp.Table{}
		if s.Ordered {
			args[singleActive] = true
		}
		specs = append(specs, queueSpec{name, s.queueType(), own, args})
	}
	if s.partitioned() {
		specs = append(specs, queueSpec{s.members(), s.queueType(), own, amqp.Table{}})
	}
	return specs
}

// Setup declares what is missing of the queue or its partitions, the dead-letter queues, the queues and exchanges
// that all consumers of the vhost share, and the exchanges of Config.Bindings, and makes the bindings. All are
// durable; the exchanges of the bindings are of type topic. Queues that exist are used as they are. Setup may be
// called any number of times, by many processes at once, before or after the Setup of a publisher to the same
// exchange. "Queues" in the package's doc lists the names and the permissions it needs.
//
// With Config.Partitions it fails where queues or exchanges of another number of partitions exist: they
// would go on taking messages. See "Partitions" in the package's doc.
//
// A user without the permissions may call it where all queues and exchanges exist. The bindings among them, which
// AMQP cannot list, are then taken to exist. Those of Config.Bindings always need the permissions.
func (c *Consumer) Setup(ctx context.Context) error {
	if err := amqpconn.Use(ctx, c.source.dial, c.cfg.Timeout, c.cfg.setUp); err != nil {
		return fmt.Errorf("inboxamqp: setup: %w", err)
	}
	return nil
}

func (s *settings) setUp(conn *amqpconn.Conn) error {
	made, err := s.declareAll(conn)
	if err != nil {
		return err
	}
	for _, bind := range [...]func(*amqpconn.Conn) error{s.bindShared, s.bindPartitions} {
		if err := bind(conn); err != nil && (made || !isRefused(err)) {
			return err
		}
	}
	for _, b := range s.Bindings {
		if _, err := declareExchange(conn, b.Exchange); err != nil {
			return fmt.Errorf("exchange %q: %w", b.Exchange, err)
		}
		if err := s.bind(conn, b); err != nil {
			return fmt.Errorf("binding to exchange %q by %q: %w", b.Exchange, b.Key, err)
		}
	}
	return nil
}

// declareAll declares the exchanges of the consumer and those that all share, and the queues. It reports whether
// anything was missing.
func (s *settings) declareAll(conn *amqpconn.Conn) (made bool, err error) {
	slots, err := s.declareSlots(conn)
	if err != nil {
		return false, err
	}
	exchanges, err := declareShared(conn)
	if err != nil {
		return false, err
	}
	made = slots || exchanges
	for _, spec := range s.queues() {
		one, err := declareQueue(conn, spec)
		if err != nil {
			return false, fmt.Errorf("queue %q: %w", spec.name, err)
		}
		made = made || one
	}
	return made, nil
}

func declareQueue(conn *amqpconn.Conn, spec queueSpec) (made bool, err error) {
	return declare(func() (bool, error) { return conn.QueueExists(spec.name) }, func() error { return conn.Try(spec.declare) })
}

func declareExchange(conn *amqpconn.Conn, name string) (made bool, err error) {
	return declare(func() (bool, error) { return conn.ExchangeExists(name) }, func() error {
		return conn.Try(func(ch *amqp.Channel) error {
			return ch.ExchangeDeclare(name, amqp.ExchangeTopic, true, false, false, false, nil)
		})
	})
}

// declare makes what does not exist. Another process may do so meanwhile, with other arguments:
// that one wins.
func declare(exists func() (bool, error), create func() error) (made bool, err error) {
	if there, err := exists(); there || err != nil {
		return false, err
	}
	err = create()
	if err == nil {
		return true, nil
	}
	if there, _ := exists(); there {
		return true, nil
	}
	return false, err
}

// declareSame declares an exchange, also where it exists, so that the broker compares the two. A user who may not
// declare it passes where it exists.
func declareSame(conn *amqpconn.Conn, name string, create func(*amqp.Channel) error) (made bool, err error) {
	exists, err := conn.ExchangeExists(name)
	if err != nil {
		return false, err
	}
	err = conn.Try(create)
	if exists && isRefused(err) {
		err = nil
	}
	return !exists, err
}
