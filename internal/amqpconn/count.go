package amqpconn

import (
	"fmt"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// A quorum queue whose leader does not reply within statPatience is answered for by the broker: it has no
// messages and no consumers. Such an answer is asked for again, countAsks times at most.
const (
	statPatience = 250 * time.Millisecond
	countAsks    = 8
	countPause   = 50 * time.Millisecond
)

// Count asks how many messages of a queue are ready for delivery, and how many consumers it has. A queue
// that does not exist has none. It returns an error where the queue is too busy to tell.
func (c *Conn) Count(name string) (amqp.Queue, error) {
	near := false // the network alone does not take as long
	for n := 1; ; n++ {
		q, trip, took, err := c.stat(name)
		if IsNotFound(err) {
			return q, nil
		}
		near = near || trip < statPatience
		switch told := q.Messages > 0 || q.Consumers > 0 || took < statPatience; {
		case err != nil || told:
			return q, err
		case n < countAsks:
			time.Sleep(countPause)
		case near:
			return q, fmt.Errorf("queue %q does not tell how many messages it has: it is too busy", name)
		default:
			return q, nil
		}
	}
}

// stat asks once. It measures a round trip that is no question to the queue, and the one that is.
func (c *Conn) stat(name string) (q amqp.Queue, trip, took time.Duration, err error) {
	begun := time.Now()
	err = c.Try(func(ch *amqp.Channel) (err error) {
		open := time.Now()
		trip = open.Sub(begun)
		q, err = ch.QueueDeclarePassive(name, true, false, false, false, nil)
		took = time.Since(open)
		return err
	})
	return q, trip, took, err
}
