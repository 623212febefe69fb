package faults_test

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

const (
	exchange = "faults"
	queue    = "ledger"
	// prefetch is how many messages the consumer may be given again after a session broke.
	prefetch = 100
)

// consumer writes all that a queue holds into a ledger, over any number of connections.
type consumer struct {
	url    string
	ledger *ledger
	lost   atomic.Int64 // sessions that ended in another way than by stop
	stop   func()
}

// consume declares exchange and queue and starts a consumer.
func consume(t testing.TB, url string, l *ledger) *consumer {
	t.Helper()
	must(t, onBroker(t.Context(), url, declare))
	c := &consumer{url: url, ledger: l}
	c.stop = beside(t, c.run)
	return c
}

// declare lays out what the relays publish to.
func declare(ch *amqp.Channel) error {
	if err := ch.ExchangeDeclare(exchange, amqp.ExchangeTopic, true, false, false, false, nil); err != nil {
		return err
	}
	if _, err := ch.QueueDeclare(queue, true, false, false, false, nil); err != nil {
		return err
	}
	return ch.QueueBind(queue, "faults.#", exchange, false, nil)
}

func (c *consumer) run(ctx context.Context) error {
	for ctx.Err() == nil {
		if err := onBroker(ctx, c.url, func(ch *amqp.Channel) error { return c.session(ctx, ch) }); err != nil && ctx.Err() == nil {
			c.lost.Add(1)
			_ = runloop.Sleep(ctx, 50*time.Millisecond)
		}
	}
	return nil
}

var errEnded = errors.New("the broker ended the session")

func (c *consumer) session(ctx context.Context, ch *amqp.Channel) error {
	if err := ch.Qos(prefetch, 0, false); err != nil {
		return err
	}
	deliveries, err := ch.Consume(queue, "", false, false, false, false, nil)
	if err != nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case d, open := <-deliveries:
			if !open {
				return errEnded
			}
			id, err := uuid.Parse(d.MessageId)
			if err != nil {
				return err
			}
			c.ledger.deliver(id, d.Redelivered)
			if err := d.Ack(false); err != nil {
				return err
			}
		}
	}
}

// onBroker runs do on a channel of its own. It bears a broker that is slow; one that is silent ends it
// after the 15 seconds that the client's heartbeats allow.
func onBroker(ctx context.Context, url string, do func(*amqp.Channel) error) error {
	conn, err := amqp.DialConfig(url, amqp.Config{Dial: func(network, addr string) (net.Conn, error) {
		conn, err := (&net.Dialer{}).DialContext(ctx, network, addr)
		if err == nil {
			err = conn.SetDeadline(time.Now().Add(patience)) // of the handshake; the client removes it
		}
		return conn, err
	}})
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

// untilDrained waits until the queue is empty and nothing has arrived for a while: repeats too.
func (c *consumer) untilDrained(t testing.TB) {
	t.Helper()
	seen := -1
	testenv.Eventually(t, patience, func() error {
		time.Sleep(200 * time.Millisecond)
		n := c.ledger.delivered()
		still := n == seen
		seen = n
		return onBroker(t.Context(), c.url, func(ch *amqp.Channel) error {
			q, err := ch.QueueDeclarePassive(queue, true, false, false, false, nil)
			if err == nil && (!still || q.Messages > 0) {
				err = errors.New("messages keep arriving")
			}
			return err
		})
	})
}

// untilTrue polls.
func untilTrue(t testing.TB, what string, check func() bool) {
	t.Helper()
	testenv.Eventually(t, patience, func() error {
		if !check() {
			return errors.New("not yet: " + what)
		}
		return nil
	})
}
