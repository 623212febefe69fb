package observability

import (
	"context"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
)

// books handles messages by their name: well, never, in vain, or for longer than it may.
func (p parts) books() *inboxpgx.Store {
	p.t.Helper()
	books, err := inboxtest.New(p.manager(), "billing", inboxpgx.Config{MeterProvider: p.meters})
	if err != nil {
		p.t.Fatal(err)
	}
	for name, handle := range map[string]func() error{
		"good": func() error { return nil },
		"weak": func() error { return errDown },
		"bad":  func() error { return inbox.Unrecoverable(errDown) },
		"slow": func() error { time.Sleep(time.Minute); return nil },
	} {
		err := inboxpgx.Handle(books, name, func(context.Context, pgx.Tx, int) error { return handle() })
		if err != nil {
			p.t.Fatal(err)
		}
	}
	return books
}

func (p parts) consumerConfig() inbox.ConsumerConfig {
	return inbox.ConsumerConfig{HandlerTimeout: 10 * time.Second, MeterProvider: p.meters, Logger: p.log}
}

// consumer settles messages in every way. All are delivered twice.
func (p parts) consumer(known exported) {
	p.consume(known, inboxtest.Config{ConsumerConfig: p.consumerConfig(), Fault: inboxtest.DeliverTwice}, "good", "weak", "bad", "slow")
}

// orderedConsumer has a key wait for its dead letter.
func (p parts) orderedConsumer(known exported) {
	cfg := inboxtest.Config{ConsumerConfig: p.consumerConfig()}
	cfg.Ordered, cfg.ParkKeys = true, true
	p.consume(known, cfg, "bad", "good")
}

func (p parts) consume(known exported, cfg inboxtest.Config, names ...string) {
	p.t.Helper()
	broker := inboxtest.NewBroker()
	consumer, err := inboxtest.NewConsumer(broker, "billing", p.books(), cfg)
	if err != nil {
		p.t.Fatal(err)
	}
	stop := p.background(consumer.Run)
	for _, name := range names {
		m := &inbox.Message{ID: uuid.Must(uuid.NewV7()), Name: name, Key: "a", Body: []byte("1")}
		if err := broker.Send(p.t.Context(), m); err != nil {
			p.t.Fatal(err)
		}
	}
	for range 20 { // dead letters are counted while somebody looks
		time.Sleep(5 * time.Second)
		known.gather(p.t, p.registry)
	}
	stop()
}

func (p parts) amqpConsumer() func(context.Context) error {
	consumer, err := inboxamqp.NewConsumer(noRabbitMQ, "billing", p.books(), inboxamqp.Config{ConsumerConfig: p.consumerConfig()})
	if err != nil {
		p.t.Fatal(err)
	}
	return consumer.Run
}

func (p parts) redisConsumer(client *redis.Client) func(context.Context) error {
	cfg := inboxredis.Config{ConsumerConfig: p.consumerConfig()}
	cfg.Name = "billing"
	consumer, err := inboxredis.NewConsumer(client, "billing", p.books(), cfg)
	if err != nil {
		p.t.Fatal(err)
	}
	return consumer.Run
}
