package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/lab/ledger"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
)

const (
	relays   = 2
	exchange = "ledger"
	queue    = "ledger"
	prefetch = 100
	// writersPause is that between two transactions of a writer, at most.
	writersPause = 200 * time.Millisecond
)

var quiet = slog.New(slog.DiscardHandler)

// stream writes messages in the order of keys into an outbox of its own, while everything else goes on, relays them
// to a quorum queue, and receives them. A ledger notes what was told and what came.
type stream struct {
	house  *house
	pool   *pgxpool.Pool
	store  *outboxpgx.Store
	ledger *ledger.Ledger

	stopWriters, stopAll func()
}

func openStream(ctx context.Context, h *house) (s *stream, err error) {
	s = &stream{house: h, ledger: ledger.New()}
	if err := onPostgres(ctx, h.database(), "CREATE SCHEMA ledger"); err != nil {
		return nil, err
	}
	cfg, err := pgxpool.ParseConfig(h.database() + "&search_path=ledger")
	if err != nil {
		return nil, err
	}
	txretry.PreparePool(cfg)
	cfg.MaxConns = 12
	if s.pool, err = pgxpool.NewWithConfig(ctx, cfg); err != nil {
		return nil, err
	}
	if s.store, err = outboxpgx.New(s.pool, outboxpgx.Config{Logger: quiet}); err != nil {
		return nil, err
	}
	if err := s.store.Migrate(ctx); err != nil {
		return nil, err
	}
	if err := ledger.Migrate(ctx, s.pool); err != nil {
		return nil, err
	}
	if err := ledger.Dial(h.dial).Do(ctx, declare); err != nil {
		return nil, err
	}
	return s, s.start(ctx)
}

// declare lays out what the relays publish to. One consumer at a time keeps the order.
func declare(ch *amqp.Channel) error {
	if err := ch.ExchangeDeclare(exchange, amqp.ExchangeTopic, true, false, false, false, nil); err != nil {
		return err
	}
	args := amqp.Table{amqp.QueueTypeArg: amqp.QueueTypeQuorum, amqp.SingleActiveConsumerArg: true}
	if _, err := ch.QueueDeclare(queue, true, false, false, false, args); err != nil {
		return err
	}
	return ch.QueueBind(queue, "#", exchange, false, nil)
}

func (s *stream) start(ctx context.Context) error {
	writing, stopWriting := context.WithCancel(ctx)
	working, stopWorking := context.WithCancel(ctx)
	var writers, workers sync.WaitGroup
	s.stopWriters = func() { stopWriting(); writers.Wait() }
	s.stopAll = func() { stopWriting(); stopWorking(); writers.Wait(); workers.Wait(); s.pool.Close() }
	for range relays {
		publisher, err := outboxamqp.NewPublisher(s.house.dial, outboxamqp.Config{Exchange: exchange, Logger: quiet})
		if err != nil {
			return err
		}
		relay, err := outbox.NewRelay(s.store, publisher, outbox.RelayConfig{Logger: quiet})
		if err != nil {
			return err
		}
		workers.Go(func() { _ = relay.Run(working) }) // what it leaves undone is found
	}
	consumer := &ledger.Consumer{Dial: s.house.dial, Queue: queue, Prefetch: prefetch, Ledger: s.ledger}
	workers.Go(func() { _ = consumer.Run(working) }) // it returns nil
	writer, err := ledger.NewWriter(s.pool, s.store, s.ledger, "ledger.done", rand.Uint64(), writersPause)
	if err != nil {
		return err
	}
	writers.Go(func() { _ = writer.Run(writing) }) // it returns nil
	return nil
}

// audit waits until everything that committed has arrived, or does not. The writers have ended.
func (s *stream) audit(ctx context.Context) (ledger.Verdict, error) {
	deeds, err := ledger.Deeds(ctx, s.pool)
	if err != nil {
		return ledger.Verdict{}, err
	}
	if len(deeds) == 0 {
		return ledger.Verdict{}, errors.New("nothing was written into the stream")
	}
	_ = eventually(ctx, func(context.Context) error { // the verdict tells what is missing
		if n := len(s.ledger.Missing(deeds)); n > 0 {
			return fmt.Errorf("%d messages are missing", n)
		}
		return nil
	})
	return s.ledger.Audit(deeds), nil
}

// dial connects to any node of RabbitMQ.
func (h *house) dial(ctx context.Context) (conn *amqp.Connection, err error) {
	first := rand.IntN(len(h.rabbit))
	for i := range h.rabbit {
		attempt, cancel := context.WithTimeout(ctx, 5*time.Second)
		conn, err = outboxamqp.Dial(h.rabbit[(first+i)%len(h.rabbit)].URL(), amqp.Config{Heartbeat: 3 * time.Second})(attempt)
		cancel()
		if err == nil {
			return conn, nil
		}
	}
	return nil, err
}
