package ledger

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// Consumer writes all that a queue of RabbitMQ holds into a ledger, over any number of connections.
type Consumer struct {
	Dial     Dial
	Queue    string
	Prefetch int
	Ledger   *Ledger

	lost atomic.Int64
}

// Lost counts the sessions that have ended in another way than by the end of Run.
func (c *Consumer) Lost() int64 { return c.lost.Load() }

// Run consumes until ctx ends, and returns nil.
func (c *Consumer) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		if err := c.Dial.Do(ctx, func(ch *amqp.Channel) error { return c.session(ctx, ch) }); err != nil && ctx.Err() == nil {
			c.lost.Add(1)
			_ = runloop.Sleep(ctx, 50*time.Millisecond)
		}
	}
	return nil
}

// ErrEnded is what ends a session of a consumer that nobody has asked to end.
var ErrEnded = errors.New("the broker ended the session")

func (c *Consumer) session(ctx context.Context, ch *amqp.Channel) error {
	if err := ch.Qos(c.Prefetch, 0, false); err != nil {
		return err
	}
	deliveries, err := ch.Consume(c.Queue, "", false, false, false, false, nil)
	if err != nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case d, open := <-deliveries:
			if !open {
				return ErrEnded
			}
			id, err := uuid.Parse(d.MessageId)
			if err != nil {
				return err
			}
			c.Ledger.Deliver(id, d.Redelivered)
			if err := d.Ack(false); err != nil {
				return err
			}
		}
	}
}

// Dial opens a connection to a broker, within the time of ctx.
type Dial func(ctx context.Context) (*amqp.Connection, error)

// At dials url. It bears a broker that is slow; one that is silent ends the connection after the 15 seconds that the
// client's heartbeats allow.
func At(url string) Dial {
	return func(ctx context.Context) (*amqp.Connection, error) {
		return amqp.DialConfig(url, amqp.Config{Dial: func(network, addr string) (net.Conn, error) {
			conn, err := (&net.Dialer{}).DialContext(ctx, network, addr)
			if err == nil {
				err = conn.SetDeadline(time.Now().Add(testenv.Patience)) // of the handshake; the client removes it
			}
			return conn, err
		}})
	}
}

// OnBroker runs do on a channel of its own, At url.
func OnBroker(ctx context.Context, url string, do func(*amqp.Channel) error) error {
	return At(url).Do(ctx, do)
}

// Do runs do on a channel of its own.
func (d Dial) Do(ctx context.Context, do func(*amqp.Channel) error) error {
	conn, err := d(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = conn.CloseDeadline(time.Now().Add(2 * time.Second)) }() // late or not, it is closed
	ch, err := conn.Channel()
	if err != nil {
		return err
	}
	return do(ch)
}
