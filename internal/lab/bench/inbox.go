package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v3/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry"
)

func inboxWorkload() workload {
	return workload{"inbox", []part{
		{"1", func(ctx context.Context, b *bench) { benchInboxSingle(ctx, b, 1, 20) }},
		{"8", func(ctx context.Context, b *bench) { benchInboxSingle(ctx, b, 8, 8) }},
		{"batch", benchInboxBatch},
	}}
}

// Names of contenders that goals use.
const (
	rawFolded      = "raw, its dedup entry in one trip with BEGIN"
	rawBatch       = "raw, a transaction per 200"
	inboxSingle    = "holdfast"
	inboxMany      = "holdfast, batches of 200, a batch handler"
	watermillInbox = "watermill router, dedup insert"
)

var inboxColumns = []string{"messages/s", "client us/message"}

// benchInboxSingle runs several handlers in parallel, each message in its own SERIALIZABLE
// transaction with the dedup entry and one business row.
func benchInboxSingle(ctx context.Context, b *bench, handlers, part int) {
	i := newIntake(ctx, b)
	r := b.measure(ctx, table{
		title:      fmt.Sprintf("inbox, %d handlers, %d messages of %d bytes, classic queue", handlers, b.messages/part, len(body)),
		columns:    inboxColumns,
		yardsticks: []string{rawFolded, watermillInbox},
		contenders: []contender{
			i.contender(rawFolded, part, i.rawSingle(handlers)),
			i.contender(inboxSingle, part, i.holdfast(handlers, 1, i.perMessage)),
			i.contender(watermillInbox, part, i.watermill(handlers)),
		},
	})
	if handlers == 1 {
		b.atLeast(1.1, r.ratio(inboxSingle, watermillInbox), "x "+watermillInbox+", 1 handler")
	} else {
		b.atLeast(0.92, r.ratio(inboxSingle, rawFolded), fmt.Sprintf("of %s, %d handlers", rawFolded, handlers))
	}
}

// benchInboxBatch compares one transaction for many messages with one transaction each.
func benchInboxBatch(ctx context.Context, b *bench) {
	i := newIntake(ctx, b)
	b.measure(ctx, table{
		title:      fmt.Sprintf("inbox, batches, %d messages of %d bytes, classic queue", b.messages, len(body)),
		columns:    inboxColumns,
		yardsticks: []string{rawBatch, inboxSingle},
		contenders: []contender{
			i.contender(rawBatch, 1, i.rawBatch(200)),
			i.contender(inboxMany, 1, i.holdfast(1, 200, i.batchHandler)),
			i.contender(inboxSingle, 6, i.holdfast(32, 1, i.perMessage)),
		},
	})
}

// holdfast runs a consumer until it has processed n messages.
func (i *intake) holdfast(workers, batch int, newProcessor func() inbox.Processor) intakeRun {
	return func(ctx context.Context, n int, watch *stopwatch) {
		processor := newProcessor()
		// As for the raw consumer, the watch starts when the connection is open.
		start := sync.OnceFunc(watch.start)
		dial := func(context.Context) (*amqp.Connection, error) {
			conn, err := amqp.Dial(i.url)
			start()
			return conn, err
		}
		consumer := must(inboxamqp.NewConsumer(dial, inboxamqp.Queue{Name: i.queue}, processor, inbox.ConsumerConfig{Concurrency: workers, Batch: batch, MessageLimit: n, Logger: quiet}))
		defer watch.stop()
		check(consumer.Run(ctx))
	}
}

func (i *intake) event(ctx context.Context, tx pgx.Tx, v string) error {
	_, err := tx.Exec(ctx, insertEvent, v)
	return err
}

// perMessage puts dedup entry and effect into one transaction.
func (i *intake) perMessage() inbox.Processor {
	p := must(inboxpgx.New(i.manager, "bench", inboxpgx.Config{}))
	check(inboxpgx.Handle(p, eventName, i.event))
	return p
}

// batchHandler is perMessage with one statement for all messages.
func (i *intake) batchHandler() inbox.Processor {
	p := must(inboxpgx.New(i.manager, "bench", inboxpgx.Config{}))
	check(inboxpgx.HandleBatch(p, eventName, func(ctx context.Context, tx pgx.Tx, items []inboxpgx.Item[string]) error {
		bodies := make([]string, len(items))
		for k, item := range items {
			bodies[k] = item.Value
		}
		_, err := tx.Exec(ctx, insertEvents, bodies)
		return err
	}))
	return p
}

const (
	eventName   = "bench.event"
	insertEvent = "INSERT INTO bench_events (body) VALUES ($1)"
)

// intake is the queue and the Postgres in which the contenders process messages.
type intake struct {
	brokerQueue
	bench   *bench
	pool    *pgxpool.Pool
	manager *txretry.Manager
	redis   *redis.Client
}

func newIntake(ctx context.Context, b *bench) *intake {
	pool := b.postgres(ctx)
	url := b.rabbitmq(ctx)
	redisURL := b.server(ctx, testenv.Redis, testenv.RedisVar)
	options := must(redis.ParseURL(redisURL))
	client := redis.NewClient(options)
	b.atEnd(client.Close)
	must(pool.Exec(ctx, "CREATE TABLE bench_events (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, body text NOT NULL)"))
	manager := must(txretry.New(pool, txretry.Config{Logger: quiet}))
	store := must(inboxpgx.New(manager, "bench", inboxpgx.Config{}))
	check(store.Migrate(ctx))
	i := &intake{
		bench: b, pool: pool, manager: manager, redis: client,
		brokerQueue: brokerQueue{url: url, queue: "holdfast_bench_" + strconv.FormatInt(time.Now().UnixNano(), 10)},
	}
	b.atEnd(func() error { return i.onBroker(i.deleteQueue) })
	return i
}

// intakeRun takes n messages from the queue. It starts and stops the watch.
type intakeRun func(ctx context.Context, n int, watch *stopwatch)

// contender makes run take a part of the messages, and fewer to warm up.
func (i *intake) contender(name string, part int, run intakeRun) contender {
	return contender{name, func(ctx context.Context, length time.Duration) sample {
		n := i.bench.portion(length, part)
		i.fill(ctx, n)
		watch := stopwatch{bench: i.bench}
		run(ctx, n, &watch)
		check(watch.err)
		i.expect(ctx, n)
		return watch.sample(n)
	}}
}

// fill prepares a run: empty tables and a new queue with n messages.
func (i *intake) fill(ctx context.Context, n int) {
	must(i.pool.Exec(ctx, "TRUNCATE holdfast_inbox, bench_events"))
	check(i.onBroker(func(ch *amqp.Channel) error {
		if err := i.renewQueue(ch); err != nil {
			return err
		}
		if err := ch.Confirm(false); err != nil {
			return err
		}
		return publishWindow(ch, i.queue, n, func(m *amqp.Publishing) {
			m.MessageId, m.Type = ids.New().String(), eventName
			m.Headers = amqp.Table{watermillID: m.MessageId}
		})
	}))
}

// expect fails unless each message took effect once and left the queue.
func (i *intake) expect(ctx context.Context, n int) {
	var effects, left int
	check(i.pool.QueryRow(ctx, "SELECT count(*) FROM bench_events").Scan(&effects))
	err := i.onBroker(func(ch *amqp.Channel) error {
		q, err := ch.QueueDeclarePassive(i.queue, true, false, false, false, nil)
		left = q.Messages
		return err
	})
	if err == nil && (effects != n || left != 0) {
		err = fmt.Errorf("%d effects of %d messages, %d left in the queue", effects, n, left)
	}
	check(err)
}

// watermillID is the header in which watermill expects a message's id.
const watermillID = wamqp.DefaultMessageUUIDHeaderKey

// watermill runs its router with several handlers, because each takes one message at a time. They
// use the transaction of the raw consumer, because watermill's own deduplicator is in memory.
func (i *intake) watermill(handlers int) intakeRun {
	return func(ctx context.Context, n int, watch *stopwatch) {
		logger := watermill.NopLogger{}
		cfg := wamqp.NewDurableQueueConfig(i.url)
		cfg.Consume.Qos.PrefetchCount = 50
		subscriber := must(wamqp.NewSubscriber(cfg, logger))
		router := must(message.NewRouter(message.RouterConfig{}, logger))
		done := newFinish(n, watch)
		for h := range handlers {
			router.AddConsumerHandler(fmt.Sprint("bench", h), i.queue, subscriber, func(m *message.Message) error {
				if err := i.watermillOne(m); err != nil {
					return err
				}
				done.one()
				return nil
			})
		}
		running, cancel := context.WithCancel(ctx)
		defer cancel()
		ended := make(chan error, 1)
		watch.start()
		go func() { ended <- router.Run(running) }()
		check(errors.Join(done.wait(ctx), router.Close(), <-ended, subscriber.Close()))
	}
}

func (i *intake) watermillOne(m *message.Message) error {
	ctx := m.Context()
	var v string
	if err := json.Unmarshal(m.Payload, &v); err != nil {
		return err
	}
	return pgx.BeginTxFunc(ctx, i.pool, pgx.TxOptions{BeginQuery: rawBegin}, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, rawDedup, "watermill", m.UUID)
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
		_, err = tx.Exec(ctx, insertEvent, v)
		return err
	})
}

const (
	rawLockTimeout = "set local lock_timeout = '8s'"
	rawBegin       = "begin isolation level serializable; " + rawLockTimeout
	rawDedup       = "INSERT INTO holdfast_inbox (consumer, message_id) VALUES ($1, $2) ON CONFLICT DO NOTHING"
	rawDedupMany   = `INSERT INTO holdfast_inbox (consumer, message_id)
		SELECT $1, id FROM unnest($2::uuid[]) AS id ON CONFLICT DO NOTHING RETURNING message_id`
	insertEvents = "INSERT INTO bench_events (body) SELECT unnest($1::text[])"
)

var errDuplicate = errors.New("unexpected duplicate")

// leastWindow is the minimum prefetch of the raw consumers. With less they would wait for the
// broker.
const leastWindow = 64

// rawSingle is a hand-written consumer with several goroutines.
func (i *intake) rawSingle(handlers int) intakeRun {
	return func(ctx context.Context, n int, watch *stopwatch) {
		check(i.consume(max(leastWindow, 4*handlers), n, watch, func(deliveries <-chan amqp.Delivery) error {
			work := make(chan amqp.Delivery)
			errs := make([]error, handlers)
			var running sync.WaitGroup
			for w := range handlers {
				running.Go(func() {
					for d := range work {
						if err := i.rawOne(ctx, d); err != nil && errs[w] == nil {
							errs[w] = err
						}
					}
				})
			}
			for range n {
				work <- <-deliveries
			}
			close(work)
			running.Wait()
			return errors.Join(errs...)
		}))
	}
}

func (i *intake) rawOne(ctx context.Context, d amqp.Delivery) error {
	var v string
	if err := json.Unmarshal(d.Body, &v); err != nil {
		return err
	}
	if err := i.rawFolded(ctx, d.MessageId, v); err != nil {
		return err
	}
	return d.Ack(false)
}

// rawFolded is a transaction of three round trips: the dedup entry travels with BEGIN.
func (i *intake) rawFolded(ctx context.Context, id, v string) error {
	return i.pool.AcquireFunc(ctx, func(c *pgxpool.Conn) error {
		var b pgx.Batch
		b.BeginTx(pgx.TxOptions{IsoLevel: pgx.Serializable})
		b.Queue(rawLockTimeout)
		b.Queue(rawDedup, "raw", id).Exec(func(tag pgconn.CommandTag) error {
			if tag.RowsAffected() == 0 {
				return errDuplicate
			}
			return nil
		})
		results := c.SendBatch(ctx, &b)
		tx := results.Tx()
		err := results.Close()
		if err == nil {
			_, err = tx.Exec(ctx, insertEvent, v)
		}
		if err != nil {
			return errors.Join(err, tx.Rollback(ctx))
		}
		return tx.Commit(ctx)
	})
}

// rawBatch is one goroutine with one transaction per size messages.
func (i *intake) rawBatch(size int) intakeRun {
	return func(ctx context.Context, n int, watch *stopwatch) {
		check(i.consume(4*size, n, watch, func(deliveries <-chan amqp.Delivery) error {
			for left := n; left > 0; left -= min(size, left) {
				if err := i.rawMany(ctx, deliveries, min(size, left)); err != nil {
					return err
				}
			}
			return nil
		}))
	}
}

func (i *intake) rawMany(ctx context.Context, deliveries <-chan amqp.Delivery, n int) error {
	all := make([]amqp.Delivery, n)
	for k := range all {
		all[k] = <-deliveries
	}
	if err := i.rawTogether(ctx, all); err != nil {
		return err
	}
	return all[n-1].Ack(true)
}

// rawTogether processes all messages in one transaction.
func (i *intake) rawTogether(ctx context.Context, all []amqp.Delivery) error {
	keys, bodies := make([]string, len(all)), make([]string, len(all))
	for k, d := range all {
		keys[k] = d.MessageId
		if err := json.Unmarshal(d.Body, &bodies[k]); err != nil {
			return err
		}
	}
	return pgx.BeginTxFunc(ctx, i.pool, pgx.TxOptions{BeginQuery: rawBegin}, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, rawDedupMany, "raw", keys)
		if err != nil {
			return err
		}
		first, err := pgx.CollectRows(rows, pgx.RowTo[[16]byte])
		if err != nil {
			return err
		}
		if len(first) != len(all) {
			return errDuplicate
		}
		_, err = tx.Exec(ctx, insertEvents, bodies)
		return err
	})
}

// consume opens a connection and measures do, from its start until the broker has read the last ack.
func (i *intake) consume(prefetch, n int, watch *stopwatch, do func(<-chan amqp.Delivery) error) error {
	conn, err := amqp.Dial(i.url)
	if err != nil {
		return err
	}
	defer conn.Close()
	ch, err := conn.Channel()
	if err != nil {
		return err
	}
	if err := ch.Qos(prefetch, 0, false); err != nil {
		return err
	}
	watch.start()
	deliveries, err := ch.Consume(i.queue, "", false, false, false, false, nil)
	if err != nil {
		return err
	}
	err = do(deliveries)
	err = errors.Join(err, ch.Close())
	watch.stop()
	return err
}

// streamIntake is an intake whose messages are in a Redis stream.
type streamIntake struct {
	*intake
	stream string
}

const streamGroup = "bench"

func (s *streamIntake) contender(name string, part int, run intakeRun) contender {
	return contender{name, func(ctx context.Context, length time.Duration) sample {
		n := s.bench.portion(length, part)
		s.fill(ctx, n)
		watch := stopwatch{bench: s.bench}
		run(ctx, n, &watch)
		check(watch.err)
		s.expect(ctx, n)
		return watch.sample(n)
	}}
}

func (s *streamIntake) clear(ctx context.Context) error {
	return s.redis.Del(ctx, s.stream, "{"+s.stream+"}:"+streamGroup+":retries").Err()
}

// fill prepares a run: empty tables and a new stream with n messages.
func (s *streamIntake) fill(ctx context.Context, n int) {
	must(s.pool.Exec(ctx, "TRUNCATE holdfast_inbox, bench_events"))
	check(s.clear(ctx))
	consumer := s.consumer(inbox.NewMux(), inbox.ConsumerConfig{})
	check(consumer.Setup(ctx))
	for n > 0 {
		pipe := s.redis.Pipeline()
		for range min(n, 1000) {
			pipe.XAdd(ctx, &redis.XAddArgs{Stream: s.stream, Values: []any{
				"id", ids.New().String(), "name", eventName, "content-type", "application/json", "key", "",
				"created-at", time.Now().UTC().Format(time.RFC3339Nano), "headers", "{}", "body", body,
			}})
			n--
		}
		must(pipe.Exec(ctx))
	}
}

// expect fails unless each message took effect once and is not pending.
func (s *streamIntake) expect(ctx context.Context, n int) {
	var effects int
	check(s.pool.QueryRow(ctx, "SELECT count(*) FROM bench_events").Scan(&effects))
	for begin := time.Now(); ; time.Sleep(10 * time.Millisecond) { // the last acks may be on their way
		pending := must(s.redis.XPending(ctx, s.stream, streamGroup).Result())
		if effects == n && pending.Count == 0 {
			return
		}
		if time.Since(begin) > 10*time.Second {
			check(fmt.Errorf("%d effects of %d messages, %d pending", effects, n, pending.Count))
			return
		}
	}
}

func (s *streamIntake) consumer(p inbox.Processor, cfg inbox.ConsumerConfig) *inboxredis.Consumer {
	cfg.Name, cfg.Logger = streamGroup, quiet
	return must(inboxredis.NewConsumer(s.redis, inboxredis.Stream{Name: s.stream}, p, cfg))
}

// counted reports when the given number of messages has passed, like watermill's handlers do.
type counted struct {
	inbox.Processor
	done *finish
}

func (c counted) Process(ctx context.Context, msgs []*inbox.Message) []error {
	results := c.Processor.Process(ctx, msgs)
	for _, err := range results {
		if err == nil {
			c.done.one()
		}
	}
	return results
}

// holdfast runs a consumer until it has processed n messages. Its shutdown is not measured: it may
// wait a second for a blocking read of Redis.
func (s *streamIntake) holdfast(workers, batch int, newProcessor func() inbox.Processor) intakeRun {
	return func(ctx context.Context, n int, watch *stopwatch) {
		processor := newProcessor()
		consumer := s.consumer(counted{processor, newFinish(n, watch)}, inbox.ConsumerConfig{Concurrency: workers, Batch: batch, MessageLimit: n})
		watch.start()
		check(consumer.Run(ctx))
	}
}
