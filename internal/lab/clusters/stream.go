package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/lab/ledger"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
)

const (
	streamKeys    = 20
	streamWriters = 2
	relays        = 2
	exchange      = "ledger"
	queue         = "ledger"
	prefetch      = 100
)

var quiet = slog.New(slog.DiscardHandler)

// stream writes messages in the order of keys into an outbox of its own, while everything else goes on, relays them
// to a quorum queue, and receives them. A ledger notes what was told and what came.
type stream struct {
	house   *house
	pool    *pgxpool.Pool
	manager *txretry.Manager
	store   *outboxpgx.Store
	ledger  *ledger.Ledger

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
	if s.manager, err = txretry.New(s.pool, txretry.Config{Logger: quiet}); err != nil {
		return nil, err
	}
	if s.store, err = outboxpgx.New(s.pool, outboxpgx.Config{Logger: quiet}); err != nil {
		return nil, err
	}
	if err := s.store.Migrate(ctx); err != nil {
		return nil, err
	}
	for _, sql := range []string{
		"CREATE TABLE counters (key text PRIMARY KEY, n bigint NOT NULL DEFAULT 0)",
		"CREATE TABLE deeds (id uuid PRIMARY KEY, key text NOT NULL, n bigint NOT NULL)",
	} {
		if _, err := s.pool.Exec(ctx, sql); err != nil {
			return nil, err
		}
	}
	if _, err := s.pool.Exec(ctx, "INSERT INTO counters SELECT 'key ' || k FROM generate_series(0, $1::int - 1) k", streamKeys); err != nil {
		return nil, err
	}
	if err := h.onBroker(ctx, declare); err != nil {
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
	workers.Go(func() { s.consume(working) })
	for range streamWriters {
		writers.Go(func() {
			for runloop.Sleep(writing, time.Duration(rand.IntN(100))*time.Millisecond) == nil {
				s.transact(context.WithoutCancel(writing))
			}
		})
	}
	return nil
}

var errOnPurpose = errors.New("rolled back on purpose")

// transact commits up to five messages of one key, or rolls them back. A database that fails is no error: the
// writer does not know then what became of its transaction.
func (s *stream) transact(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	key := "key " + strconv.Itoa(rand.IntN(streamKeys))
	ids := newIDs(1 + rand.IntN(5))
	rollBack := rand.IntN(8) == 0
	err := s.manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		if err := s.write(ctx, tx, key, ids); err != nil {
			return err
		}
		if rollBack {
			return errOnPurpose
		}
		return nil
	})
	if err == nil || errors.Is(err, errOnPurpose) {
		s.ledger.Note(err == nil, ids)
	}
}

func newIDs(n int) []uuid.UUID {
	all := make([]uuid.UUID, n)
	for i := range all {
		all[i] = ids.New()
	}
	return all
}

func (s *stream) write(ctx context.Context, tx pgx.Tx, key string, all []uuid.UUID) error {
	var last int64
	if err := tx.QueryRow(ctx, "UPDATE counters SET n = n + $2 WHERE key = $1 RETURNING n", key, len(all)).Scan(&last); err != nil {
		return err
	}
	ns, msgs := make([]int64, len(all)), make([]outbox.Message, len(all))
	for i, id := range all {
		ns[i] = last - int64(len(all)-1-i)
		msgs[i] = outbox.Message{ID: id, Name: "ledger.done", Key: key, Body: fmt.Appendf(nil, `{"n":%d}`, ns[i])}
	}
	if _, err := tx.Exec(ctx, "INSERT INTO deeds SELECT unnest($1::uuid[]), $2, unnest($3::bigint[])", all, key, ns); err != nil {
		return err
	}
	return s.store.Write(ctx, tx, msgs...)
}

// consume notes what arrives, over any number of connections.
func (s *stream) consume(ctx context.Context) {
	for ctx.Err() == nil {
		_ = s.house.onBroker(ctx, func(ch *amqp.Channel) error { return s.session(ctx, ch) })
		_ = runloop.Sleep(ctx, 100*time.Millisecond)
	}
}

func (s *stream) session(ctx context.Context, ch *amqp.Channel) error {
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
				return errors.New("the broker ended the session")
			}
			id, err := uuid.Parse(d.MessageId)
			if err != nil {
				return err
			}
			s.ledger.Deliver(id, d.Redelivered)
			if err := d.Ack(false); err != nil {
				return err
			}
		}
	}
}

// deeds are what has committed, by the word of the database.
func (s *stream) deeds(ctx context.Context) ([]ledger.Deed, error) {
	rows, err := s.pool.Query(ctx, "SELECT id, key, n FROM deeds")
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (d ledger.Deed, err error) {
		return d, row.Scan(&d.ID, &d.Key, &d.N)
	})
}

// audit waits until everything that committed has arrived, or does not. The writers have ended.
func (s *stream) audit(ctx context.Context) (ledger.Verdict, error) {
	deeds, err := s.deeds(ctx)
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

// onBroker runs do on a channel of its own.
func (h *house) onBroker(ctx context.Context, do func(*amqp.Channel) error) error {
	conn, err := h.dial(ctx)
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
