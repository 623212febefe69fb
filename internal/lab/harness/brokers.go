package harness

import (
	"context"
	"errors"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// Broker is a broker of the shop, as a watch sees it: a RabbitMQ or a NATS.
type Broker interface {
	// prepare makes the broker keep each later message until it was observed.
	prepare(ctx context.Context) error
	// observe passes on the ids of all messages, in their order, over any number of connections, until ctx ends. An id may
	// come again.
	observe(ctx context.Context, arrived func(uuid.UUID))
	// deadLetters counts the dead letters of the consumers.
	deadLetters(ctx context.Context) (int, error)
}

// RabbitMQ is a Broker.
type RabbitMQ struct {
	// Dial reaches the broker, and Admin is the base of its management API.
	Dial  Dial
	Admin func() string
	// Queue has the arguments of the queue that gets a copy of every message.
	Queue amqp.Table
}

// Dial opens a connection to a broker, within the time of ctx.
type Dial func(ctx context.Context) (*amqp.Connection, error)

// At dials url. It waits for a slow broker. The client's heartbeats end a silent connection after 15 seconds.
func At(url string) Dial {
	return func(ctx context.Context) (*amqp.Connection, error) {
		return amqp.DialConfig(url, amqp.Config{Dial: func(network, addr string) (net.Conn, error) {
			conn, err := (&net.Dialer{}).DialContext(ctx, network, addr)
			if err == nil {
				err = conn.SetDeadline(time.Now().Add(testenv.Patience)) // for the handshake; the client removes it
			}
			return conn, err
		}})
	}
}

func (d Dial) do(ctx context.Context, do func(*amqp.Channel) error) error {
	conn, err := d(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = conn.CloseDeadline(time.Now().Add(2 * time.Second)) }() // closed even if this times out
	ch, err := conn.Channel()
	if err != nil {
		return err
	}
	return do(ch)
}

func (r RabbitMQ) prepare(ctx context.Context) error {
	return r.Dial.do(ctx, func(ch *amqp.Channel) error {
		if _, err := ch.QueueDeclare(observed, true, false, false, false, r.Queue); err != nil {
			return err
		}
		return ch.QueueBind(observed, "#", exchange, false, nil)
	})
}

func (r RabbitMQ) observe(ctx context.Context, arrived func(uuid.UUID)) {
	for ctx.Err() == nil {
		_ = r.Dial.do(ctx, func(ch *amqp.Channel) error { return session(ctx, ch, arrived) }) // then on a new connection
		_ = runloop.Sleep(ctx, 50*time.Millisecond)
	}
}

func session(ctx context.Context, ch *amqp.Channel, arrived func(uuid.UUID)) error {
	if err := ch.Qos(100, 0, false); err != nil {
		return err
	}
	deliveries, err := ch.Consume(observed, "", false, false, false, false, nil)
	if err != nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case d, open := <-deliveries:
			if !open {
				return errors.New("the broker ended the session")
			}
			id, err := uuid.Parse(d.MessageId)
			if err != nil {
				return err
			}
			arrived(id)
			if err := d.Ack(false); err != nil {
				return err
			}
		}
	}
}

func (r RabbitMQ) deadLetters(ctx context.Context) (int, error) { return DeadLetters(ctx, r.Admin()) }

// DeadLetters counts the messages in the consumers' dead-letter queues, through the management API.
func DeadLetters(ctx context.Context, adminURL string) (int, error) {
	var queues []struct {
		Name     string
		Messages int
	}
	if err := testenv.Admin(ctx, adminURL, http.MethodGet, "/api/queues", nil, &queues); err != nil {
		return 0, err
	}
	n := 0
	for _, q := range queues {
		if strings.Contains(q.Name, "failed") {
			n += q.Messages
		}
	}
	return n, nil
}

// NATS is a Broker.
type NATS struct {
	// URL has the addresses of the servers, separated by commas.
	URL string
}

// natsAnswer is how long the observer waits for an answer of NATS.
const natsAnswer = 5 * time.Second

func (n NATS) do(do func(jetstream.JetStream) error) error {
	conn, err := nats.Connect(n.URL, nats.PingInterval(time.Second), nats.MaxPingsOutstanding(2))
	if err != nil {
		return err
	}
	defer conn.Close()
	js, err := jetstream.New(conn, jetstream.WithDefaultTimeout(natsAnswer))
	if err != nil {
		return err
	}
	return do(js)
}

// prepare creates a durable consumer: the stream keeps a message until all of them have acknowledged it. This one gets the
// next message after the acknowledgement of the one before, so that redeliveries stay in order.
func (n NATS) prepare(ctx context.Context) error {
	return n.do(func(js jetstream.JetStream) error {
		_, err := js.CreateConsumer(ctx, exchange, jetstream.ConsumerConfig{
			Durable: observed, AckPolicy: jetstream.AckExplicitPolicy, AckWait: time.Second, MaxDeliver: -1, MaxAckPending: 1,
		})
		return err
	})
}

func (n NATS) observe(ctx context.Context, arrived func(uuid.UUID)) {
	for ctx.Err() == nil {
		_ = n.do(func(js jetstream.JetStream) error { // then on a new connection
			consumer, err := js.Consumer(ctx, exchange, observed)
			for ctx.Err() == nil && err == nil {
				err = observeOne(consumer, arrived)
			}
			return err
		})
		_ = runloop.Sleep(ctx, 50*time.Millisecond)
	}
}

// observeOne passes on one message, if one comes within a second.
func observeOne(from jetstream.Consumer, arrived func(uuid.UUID)) error {
	batch, err := from.Fetch(1, jetstream.FetchMaxWait(time.Second))
	if err != nil {
		return err
	}
	for m := range batch.Messages() {
		id, err := uuid.Parse(m.Headers().Get(nats.MsgIdHdr))
		if err != nil {
			return err
		}
		arrived(id)
		if err := m.Ack(); err != nil {
			return err
		}
	}
	return batch.Error()
}

func (n NATS) deadLetters(ctx context.Context) (dead int, err error) {
	err = n.do(func(js jetstream.JetStream) error {
		streams := js.ListStreams(ctx)
		for s := range streams.Info() {
			if strings.HasSuffix(s.Config.Name, "=dead") {
				dead += int(s.State.Msgs)
			}
		}
		return streams.Err()
	})
	return dead, err
}
