package amqpconn

import (
	"fmt"
	"math"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// A quorum queue whose leader does not reply within statPatience is answered for by the broker: it has no
// messages and no consumers. Such an answer is known by the time that it took. It is asked for again,
// countAsks times at most.
const (
	statPatience = 250 * time.Millisecond
	countAsks    = 8
	countPause   = 50 * time.Millisecond
	// farAsks is how many asks tell a queue far away: one alone may have taken long by chance.
	farAsks = 3
)

// Count asks how many messages of a queue are ready for delivery, and how many consumers it has. A queue
// that does not exist has none. It returns an error where the queue is too busy to tell, after about
// 2.5 seconds. A quorum queue without a leader, because the majority of its nodes is down, has none either:
// the broker answers so at once.
func (c *Conn) Count(name string) (amqp.Queue, error) {
	trips, answers := time.Duration(math.MaxInt64), time.Duration(math.MaxInt64) // the shortest of each
	for n := 1; ; n++ {
		q, trip, took, err := c.stat(name)
		if IsNotFound(err) {
			return q, nil
		}
		trips, answers = min(trips, trip), min(answers, took)
		far := n >= farAsks && answers-trips < statPatience/2 // the network alone takes as long
		switch told := q.Messages > 0 || q.Consumers > 0 || took < statPatience || far; {
		case err != nil || told:
			return q, err
		case n < countAsks:
			time.Sleep(countPause)
		default:
			return q, fmt.Errorf("queue %q does not tell how many messages it has: it is too busy", name)
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
