package inboxamqp

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/wire"
)

// In front of the partitions are two exchanges. The first has the consumer's name and type direct: it
// knows the slots of keys, which senders write into the header CC, and has each slot bound to a
// partition. What comes without a slot goes on to the second, and from there to the first partition.

// slotless is the name of the second exchange. It has the number of partitions in it: the broker compares
// it when the first one is declared, and so refuses another number.
func (s *settings) slotless() string { return s.queue + ".slotless." + strconv.Itoa(s.Partitions) }

var errLeftover = errors.New("it is of another number of partitions, and goes on taking messages: see \"Partitions\" in the package's doc")

// declareSlots declares both exchanges, unless a queue of another number of partitions exists.
func (s *settings) declareSlots(conn *amqpconn.Conn) error {
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
	if err := s.slotExchange(conn); err != nil {
		return fmt.Errorf("exchange %q: %w", s.queue, err)
	}
	err := conn.Try(func(ch *amqp.Channel) error {
		return ch.ExchangeDeclare(s.slotless(), amqp.ExchangeFanout, true, false, false, false, nil)
	})
	if err != nil {
		return fmt.Errorf("exchange %q: %w", s.slotless(), err)
	}
	return nil
}

// slotExchange declares the first exchange. The broker refuses that where one of another type, or of
// another number of partitions, has its name.
func (s *settings) slotExchange(conn *amqpconn.Conn) error {
	return conn.Try(func(ch *amqp.Channel) error {
		return ch.ExchangeDeclare(s.queue, amqp.ExchangeDirect, true, false, false, false, amqp.Table{"alternate-exchange": s.slotless()})
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

// bindPartitions binds each slot to its partition, and the first partition to the second exchange.
func (s *settings) bindPartitions(conn *amqpconn.Conn) error {
	if !s.partitioned() {
		return nil
	}
	for slot := range partition.Slots {
		if err := bindQueue(conn, s.partition(slot%s.Partitions), partition.SlotName(slot), s.queue); err != nil {
			return err
		}
	}
	return bindQueue(conn, s.partition(0), "", s.slotless())
}

func bindQueue(conn *amqpconn.Conn, queue, key, exchange string) error {
	err := conn.Try(func(ch *amqp.Channel) error { return ch.QueueBind(queue, key, exchange, false, nil) })
	if err != nil {
		return fmt.Errorf("binding of queue %q to exchange %q: %w", queue, exchange, err)
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

// checkSlots looks at what is left of another number of partitions, and at the exchanges.
func (s *settings) checkSlots(conn *amqpconn.Conn, found *check.Findings) error {
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
	for _, name := range []string{s.queue, s.slotless()} {
		exists, err := conn.ExchangeExists(name)
		if err != nil {
			return err
		}
		if !exists {
			found.Add("call Consumer.Setup", "exchange %q does not exist, so partitions miss messages", name)
		} else if name == s.queue {
			if err := s.checkSlotExchange(conn, found); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *settings) checkSlotExchange(conn *amqpconn.Conn, found *check.Findings) error {
	err := s.slotExchange(conn)
	reply, refused := errors.AsType[*amqp.Error](err)
	if refused && reply.Code == amqp.PreconditionFailed {
		found.Add("when all partitions are empty delete the exchange and call Consumer.Setup, or give the consumer another queue",
			"exchange %q is not that of %d partitions: %s", s.queue, s.Partitions, reply.Reason)
		return nil
	}
	return err
}

// homeOf is where a dead letter returns to. That of a partition goes to the partition of its slot,
// whatever the number of partitions was.
func (s *settings) homeOf(queue string) (exchange, key string) {
	if number, ours := strings.CutPrefix(queue, s.queue+"."); ours && s.partitioned() {
		if _, err := strconv.ParseUint(number, 10, 8); err == nil {
			return s.queue, ""
		}
	}
	return "", queue
}

// slotOf is the slot in a message's routes, empty where there is none. Other routes of a sender count
// for the message, and not for its copies.
func slotOf(headers amqp.Table) string {
	routes, _ := headers[wire.HeaderRoutes].([]any)
	for _, route := range routes {
		if name, ok := route.(string); ok && partition.IsSlot(name) {
			return name
		}
	}
	return ""
}
