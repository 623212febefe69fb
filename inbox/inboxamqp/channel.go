package inboxamqp

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
)

var errCancelled = errors.New("the broker cancelled the consumer: the queue was deleted or moved")

// channel is the AMQP channel of one session: it receives, and settles what it received. Deliveries
// know theirs, so that nothing of an old session can be settled on a new one.
type channel struct {
	conn    *amqpconn.Conn
	amqp    *amqp.Channel
	signals *signals

	tag     string // of the consumer, while there is one
	closes  <-chan *amqp.Error
	cancels <-chan string

	tags    tags
	over    atomic.Bool   // the session has ended
	inHand  atomic.Int64  // deliveries that are not settled
	settled chan struct{} // tells drain that inHand went down
}

func newChannel(conn *amqpconn.Conn, ch *amqp.Channel, signals *signals) *channel {
	return &channel{
		conn: conn, amqp: ch, signals: signals, settled: make(chan struct{}, 1),
		closes:  ch.NotifyClose(make(chan *amqp.Error, 1)),
		cancels: ch.NotifyCancel(make(chan string, 1)),
	}
}

// subscribe becomes a consumer of the queue, for so many unsettled messages at most. What an
// earlier consumer of this channel was given does not count.
func (c *channel) subscribe(queue, name string, prefetch int) (deliveries <-chan amqp.Delivery, err error) {
	// A tag of its own each time: older RabbitMQ, 3.10.8 among them, breaks the channel when a tag
	// comes again while messages that it was given are still unsettled (rabbitmq-server#5927).
	c.tag = name + "-" + uuid.NewString()
	if err := c.conn.Within(func() error { return c.amqp.Qos(prefetch, 0, false) }); err != nil {
		return nil, fmt.Errorf("set prefetch: %w", err)
	}
	err = c.conn.Within(func() (err error) {
		deliveries, err = c.amqp.Consume(queue, c.tag, false, false, false, false, nil)
		return err
	})
	if amqpconn.IsNotFound(err) {
		return nil, fmt.Errorf("consume %q: declare it, or call Consumer.Setup: %w", queue, err)
	}
	if err != nil {
		return nil, fmt.Errorf("consume %q: %w", queue, err)
	}
	return deliveries, nil
}

// unsubscribe is a consumer no more. The delivery channel ends, after what is on its way.
func (c *channel) unsubscribe() error {
	if err := c.conn.Within(func() error { return c.amqp.Cancel(c.tag, false) }); err != nil {
		return fmt.Errorf("cancel consumer: %w", err)
	}
	return nil
}

// cause tells why the delivery channel has ended. When the channel to the broker has, the
// client closes all listeners, that for a cancellation included.
func (c *channel) cause() error {
	select {
	case _, cancelled := <-c.cancels:
		if cancelled {
			return errCancelled
		}
	default:
	}
	select {
	case err := <-c.closes:
		return closed(err)
	case <-c.conn.Done():
		return c.conn.Err()
	case <-time.After(time.Second):
		return amqp.ErrClosed
	}
}

func closed(err *amqp.Error) error {
	if err == nil {
		return amqp.ErrClosed
	}
	return fmt.Errorf("channel closed: %w", err)
}

// took counts a delivery that was received.
func (c *channel) took(raw amqp.Delivery) {
	c.inHand.Add(1)
	c.tags.add(raw.DeliveryTag)
}

// count counts a settled delivery. What was written went to the channel that the message came from,
// which its session never reopens: on an old one the client refuses, and the broker has the
// message back already.
func (c *channel) count(as outcome) {
	c.signals.count(context.Background(), as)
	c.inHand.Add(-1)
	select {
	case c.settled <- struct{}{}:
	default:
	}
}

// gone reports whether settling can have no effect any more.
func (c *channel) gone() bool {
	if c.over.Load() {
		return true
	}
	select {
	case <-c.conn.Done():
		return true
	default:
		return c.amqp.IsClosed()
	}
}

// drain waits for the messages in hand. When the connection is lost meanwhile their
// handlers go on, and the broker delivers them again.
func (c *channel) drain(abandoned <-chan struct{}) {
	for c.inHand.Load() > 0 {
		select {
		case <-c.settled:
		case <-c.conn.Done():
			return
		case <-abandoned:
			return
		}
	}
	// The acknowledgements are written; the answer to this shows that the broker has read them.
	_ = c.conn.Within(c.amqp.Close)
}
