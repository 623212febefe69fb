package inboxamqp

import (
	"fmt"
	"strconv"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/wire"
)

// All consumers of a vhost share the delay queues. A message enters by the headers exchange holdfast.delay: its
// header holdfast-delay selects the delay queue, and its routing key is the name of the queue that it returns to.
// When its time is up, the delay queue gives it to the direct exchange holdfast.return, to which every consumer
// has bound its queue by name. A message whose queue is gone goes to the queue holdfast.lost: without a route it
// would stay in the delay queue, and some dozens of those would block it for all.
const (
	sharedPrefix   = "holdfast."
	delayExchange  = sharedPrefix + "delay"
	returnExchange = sharedPrefix + "return"
	lostName       = sharedPrefix + "lost" // an exchange and its queue
)

// ladder are the delays of the delay queues. A longer delay takes several of them.
var ladder = [...]time.Duration{
	100 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond,
	time.Second, 1500 * time.Millisecond, 2 * time.Second, 3 * time.Second, 4 * time.Second, 6 * time.Second, 8 * time.Second,
	12 * time.Second, 16 * time.Second, 24 * time.Second, 32 * time.Second, 48 * time.Second, 64 * time.Second,
	2 * time.Minute, 4 * time.Minute, 8 * time.Minute, 16 * time.Minute,
}

// cover returns the step of the ladder that a delay of d takes, and what is left to wait after it: the shortest
// step of at least d or, where that is over 1.5 times d and 1.5 s, or there is none, the longest one below d.
func cover(d time.Duration) (step, rest time.Duration) {
	for i, step := range ladder {
		switch {
		case step < d:
		case i == 0 || step <= d+d/2+1500*time.Millisecond:
			return step, 0
		default:
			return ladder[i-1], d - ladder[i-1]
		}
	}
	longest := ladder[len(ladder)-1]
	return longest, d - longest
}

// delayValue is the value of the header that selects the delay queue of a step.
func delayValue(step time.Duration) string { return strconv.FormatInt(step.Milliseconds(), 10) }

func delayQueue(step time.Duration) string { return delayExchange + "." + delayValue(step) }

// sharedQueues are the queues that all consumers of a vhost share. They are quorum queues whatever Config.Classic
// says: the other consumers may need that.
func sharedQueues() []queueSpec {
	specs := []queueSpec{{name: lostName, kind: quorum, use: shared, args: amqp.Table{}}}
	for _, step := range ladder {
		specs = append(specs, queueSpec{name: delayQueue(step), kind: quorum, use: shared, args: amqp.Table{
			"x-message-ttl":          step.Milliseconds(),
			"x-dead-letter-exchange": returnExchange,
			"x-dead-letter-strategy": "at-least-once", // the message stays until the queue it returns to has taken it
			"x-overflow":             "reject-publish",
		}})
	}
	return specs
}

// sharedExchange is an exchange that all consumers of a vhost share.
type sharedExchange struct {
	name, kind string
	args       amqp.Table
}

var sharedExchanges = [...]sharedExchange{
	{lostName, amqp.ExchangeFanout, nil},
	{returnExchange, amqp.ExchangeDirect, amqp.Table{"alternate-exchange": lostName}},
	{delayExchange, amqp.ExchangeHeaders, nil},
}

func (e sharedExchange) declare(ch *amqp.Channel) error {
	return ch.ExchangeDeclare(e.name, e.kind, true, false, false, false, e.args)
}

// declareShared declares the exchanges that all consumers share. Those that exist as they should are left alone.
func declareShared(conn *amqpconn.Conn) (made bool, err error) {
	for _, e := range sharedExchanges {
		one, err := declareSame(conn, e.name, e.declare)
		if err != nil {
			return made, fmt.Errorf("exchange %q: %w", e.name, err)
		}
		made = made || one
	}
	return made, nil
}

// bindShared binds the consumer's own queues to the exchange by which messages return, and the shared queues.
func (s *settings) bindShared(conn *amqpconn.Conn) error {
	for _, name := range s.read() {
		if err := bindReturn(conn, name); err != nil {
			return err
		}
	}
	return conn.Try(func(ch *amqp.Channel) error {
		if err := ch.QueueBind(lostName, "", lostName, false, nil); err != nil {
			return fmt.Errorf("binding of queue %q: %w", lostName, err)
		}
		for _, step := range ladder {
			args := amqp.Table{"x-match": "all", wire.HeaderDelay: delayValue(step)}
			if err := ch.QueueBind(delayQueue(step), "", delayExchange, false, args); err != nil {
				return fmt.Errorf("binding of queue %q: %w", delayQueue(step), err)
			}
		}
		return nil
	})
}

// bindReturn binds a queue to the exchange by which messages return.
func bindReturn(conn *amqpconn.Conn, queue string) error {
	return bindQueue(conn, queue, queue, returnExchange)
}

// toWait makes a copy that waits for a delay and then goes to a queue.
func (c *copier) toWait(queue string, copied amqp.Publishing, delay time.Duration, putOff bool) *outgoing {
	step, rest := cover(delay)
	setWait(copied, rest)
	copied.Headers[wire.HeaderDelay] = delayValue(step)
	set(copied.Headers, wire.HeaderPutOff, "true", putOff)
	return &outgoing{exchange: delayExchange, key: queue, copied: copied, note: c.cfg.noteQueue(putOff)}
}
