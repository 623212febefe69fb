package amqpconn

import (
	"errors"

	amqp "github.com/rabbitmq/amqp091-go"
)

// ExchangeExists asks the broker. The default exchange always does.
func (c *Conn) ExchangeExists(name string) (bool, error) {
	if name == "" {
		return true, nil
	}
	return exists(c.Try(func(ch *amqp.Channel) error {
		// RabbitMQ ignores all but the name in a passive declaration.
		return ch.ExchangeDeclarePassive(name, amqp.ExchangeTopic, true, false, false, false, nil)
	}))
}

// QueueExists asks the broker.
func (c *Conn) QueueExists(name string) (bool, error) {
	return exists(c.Try(func(ch *amqp.Channel) error {
		_, err := ch.QueueDeclarePassive(name, true, false, false, false, nil)
		return err
	}))
}

func exists(err error) (bool, error) {
	if IsNotFound(err) {
		return false, nil
	}
	return err == nil, err
}

// IsNotFound reports whether the broker answered that a queue or an exchange does not exist.
func IsNotFound(err error) bool {
	var reply *amqp.Error
	return errors.As(err, &reply) && reply.Code == amqp.NotFound
}
