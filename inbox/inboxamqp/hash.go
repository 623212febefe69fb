package inboxamqp

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/wire"
)

const (
	// hashKind is the type of the exchange in front of the partitions.
	hashKind = "x-consistent-hash"
	// hashPlugin is what the broker needs for it.
	hashPlugin = "rabbitmq_consistent_hash_exchange"
	// reserved is the name of an exchange that no client may declare. The broker looks at the type first.
	reserved = "amq." + component
)

// ErrNoHashExchange is returned by Setup where Config.Partitions needs a plugin that the broker has not
// enabled; to be looked for with errors.Is.
var ErrNoHashExchange = errors.New("the broker has no exchanges of type " + hashKind +
	": enable its plugin on every node (rabbitmq-plugins enable " + hashPlugin + ")")

var errLeftover = errors.New("it is of another number of partitions, and goes on taking messages: see \"Partitions\" in the package's doc")

// checkPlugin returns ErrNoHashExchange where partitions need the plugin and it is missing. It asks on
// a connection of its own, which the broker ends if so, and declares nothing.
func (s *settings) checkPlugin(ctx context.Context, dial amqpconn.Dial) error {
	if !s.partitioned() {
		return nil
	}
	return amqpconn.Use(ctx, dial, s.Timeout, func(conn *amqpconn.Conn) error {
		err := conn.Try(func(ch *amqp.Channel) error {
			return ch.ExchangeDeclare(reserved, hashKind, true, false, false, false, nil)
		})
		reply, refused := errors.AsType[*amqp.Error](err)
		switch {
		case refused && reply.Code == amqp.CommandInvalid:
			return ErrNoHashExchange
		case refused && reply.Code == amqp.AccessRefused:
			return nil
		}
		return err
	})
}

// declareHash declares the exchange in front of the partitions, unless a queue of another number of
// partitions exists.
func (s *settings) declareHash(conn *amqpconn.Conn) error {
	if !s.partitioned() {
		return nil
	}
	for _, name := range s.leftovers() {
		exists, err := conn.QueueExists(name)
		if err != nil {
			return fmt.Errorf("look for queue %q: %w", name, err)
		}
		if exists {
			return fmt.Errorf("queue %q: %w", name, errLeftover)
		}
	}
	if err := s.hashExchange(conn); err != nil {
		return fmt.Errorf("exchange %q: %w", s.queue, err)
	}
	return nil
}

// hashExchange declares the exchange. The broker refuses that where one of another type has its name.
func (s *settings) hashExchange(conn *amqpconn.Conn) error {
	return conn.Try(func(ch *amqp.Channel) error {
		return ch.ExchangeDeclare(s.queue, hashKind, true, false, false, false, amqp.Table{"hash-header": wire.HeaderKey})
	})
}

// leftovers are the queues that exist if the number of partitions was another one: the queue without
// them, and the next one.
func (s *settings) leftovers() []string {
	switch {
	case s.partitioned():
		return []string{s.queue, s.partition(s.Partitions)}
	case s.Ordered:
		return []string{s.partition(0)}
	}
	return nil
}

// bindPartitions binds the partitions to the exchange, all with the same weight.
func (s *settings) bindPartitions(conn *amqpconn.Conn) error {
	for _, name := range s.partitions() {
		err := conn.Try(func(ch *amqp.Channel) error { return ch.QueueBind(name, "1", s.queue, false, nil) })
		if err != nil {
			return fmt.Errorf("binding of queue %q: %w", name, err)
		}
	}
	return nil
}

// bind makes a binding of the Config.
func (s *settings) bind(conn *amqpconn.Conn, b Binding) error {
	return conn.Try(func(ch *amqp.Channel) error {
		if s.partitioned() {
			return ch.ExchangeBind(s.queue, b.Key, b.Exchange, false, nil)
		}
		return ch.QueueBind(s.queue, b.Key, b.Exchange, false, nil)
	})
}

// checkHash looks at what is left of another number of partitions, and at the exchange in front of them.
func (s *settings) checkHash(conn *amqpconn.Conn, found *check.Findings) error {
	for _, name := range s.leftovers() {
		exists, err := conn.QueueExists(name)
		if err != nil {
			return err
		}
		if exists {
			found.Add("work it off with the number of partitions that it belongs to, and delete it", "queue %q: %v", name, errLeftover)
		}
	}
	if !s.partitioned() {
		return nil
	}
	exists, err := conn.ExchangeExists(s.queue)
	if err != nil {
		return err
	}
	if !exists {
		found.Add("call Consumer.Setup", "exchange %q does not exist, so no partition gets messages", s.queue)
		return nil
	}
	err = s.hashExchange(conn)
	reply, refused := errors.AsType[*amqp.Error](err)
	if refused && reply.Code == amqp.PreconditionFailed {
		found.Add("give the consumer another queue, or delete the exchange and call Consumer.Setup",
			"exchange %q is not one of type %s: %s", s.queue, hashKind, reply.Reason)
		return nil
	}
	return err
}

// homeOf is where a dead letter returns to. That of a partition goes to the partition of its key,
// whatever the number of partitions was.
func (s *settings) homeOf(queue string) (exchange, key string) {
	if number, ours := strings.CutPrefix(queue, s.queue+"."); ours && s.partitioned() {
		if _, err := strconv.ParseUint(number, 10, 8); err == nil {
			return s.home()
		}
	}
	return "", queue
}
