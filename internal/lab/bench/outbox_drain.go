package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/lab/backlog"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

var body = backlog.Body(512)

var quiet = slog.New(slog.DiscardHandler)

// drain is where the contenders of a drain work.
type drain struct {
	brokerQueue
	bench *bench
	pool  *pgxpool.Pool
	store *outboxpgx.Store
}

// brokerQueue is a queue of RabbitMQ that every run makes again.
type brokerQueue struct {
	url   string // of the broker
	queue string
	args  amqp.Table
}

// newDrain returns a drain from empty tables to a queue.
func newDrain(ctx context.Context, b *bench, queue amqp.Table) *drain {
	pool := b.postgres(ctx)
	store := must(outboxpgx.New(pool, outboxpgx.Config{Logger: quiet}))
	check(store.Migrate(ctx))
	d := &drain{
		bench: b, pool: pool, store: store,
		// The queue's name is as long as the name of a message is.
		brokerQueue: brokerQueue{b.rabbitmq(ctx), "bench." + strconv.FormatInt(time.Now().UnixNano(), 36), queue},
	}
	d.migrateRiver(ctx)
	b.atEnd(func() error { return d.onBroker(d.deleteQueue) })
	return d
}

// drainRun prepares n messages, moves them between the start and the stop of the watch,
// and returns how many of them must be in the queue now.
type drainRun func(ctx context.Context, n int, watch *stopwatch) (queued int)

// portion is that part of the messages, fewer in a warm-up.
func (b *bench) portion(length time.Duration, part int) int {
	return max(1, int(float64(b.messages)*length.Seconds()/b.length.Seconds())/part)
}

// contender has a run move that part of the messages, fewer to warm up.
func (d *drain) contender(name string, part int, run drainRun) contender {
	return contender{name, func(ctx context.Context, length time.Duration) sample {
		n := d.bench.portion(length, part)
		check(d.reset(ctx))
		watch := stopwatch{bench: d.bench}
		want := run(ctx, n, &watch)
		check(watch.err)
		d.expect(ctx, want)
		return watch.sample(n)
	}}
}

// reset makes every run start from empty tables and a new queue.
func (d *drain) reset(ctx context.Context) error {
	if _, err := d.pool.Exec(ctx, "TRUNCATE holdfast_outbox, river_job"); err != nil {
		return err
	}
	return d.onBroker(d.renewQueue)
}

func (q brokerQueue) renewQueue(ch *amqp.Channel) error {
	if err := q.deleteQueue(ch); err != nil {
		return err
	}
	_, err := ch.QueueDeclare(q.queue, true, false, false, false, q.args)
	return err
}

func (q brokerQueue) deleteQueue(ch *amqp.Channel) error {
	_, err := ch.QueueDelete(q.queue, false, false, false)
	return err
}

// expect is an error unless each message arrived once. A queue counts a little late.
func (d *drain) expect(ctx context.Context, want int) {
	check(d.onBroker(func(ch *amqp.Channel) error {
		var depth int
		for range 100 {
			q, err := ch.QueueDeclarePassive(d.queue, true, false, false, false, d.args)
			if err != nil {
				return err
			}
			if depth = q.Messages; depth == want {
				return nil
			}
			if err := runloop.Sleep(ctx, 50*time.Millisecond); err != nil {
				return err
			}
		}
		return fmt.Errorf("%d messages in the queue, want %d", depth, want)
	}))
}

func (q brokerQueue) onBroker(do func(*amqp.Channel) error) error {
	conn, err := amqp.Dial(q.url)
	if err != nil {
		return err
	}
	ch, err := conn.Channel()
	if err == nil {
		err = do(ch)
	}
	return errors.Join(err, conn.Close())
}

// fill commits n messages, with so many keys.
func (d *drain) fill(ctx context.Context, n, keys int) {
	d.fillWith(ctx, n, keys, d.message())
}

// fillWith commits copies of m.
func (d *drain) fillWith(ctx context.Context, n, keys int, m outbox.Message) {
	const atOnce = 1000
	for first := 0; first < n; first += atOnce {
		msgs := make([]outbox.Message, min(atOnce, n-first))
		for i := range msgs {
			msgs[i] = m
			if keys > 0 {
				msgs[i].Key = "key " + strconv.Itoa((first+i)%keys)
			}
		}
		check(pgx.BeginFunc(ctx, d.pool, func(tx pgx.Tx) error { return d.store.Write(ctx, tx, msgs...) }))
	}
	_, err := d.pool.Exec(ctx, "VACUUM (ANALYZE) holdfast_outbox")
	check(err)
}

// message goes to the queue through the default exchange.
func (d *drain) message() outbox.Message {
	return outbox.Message{Name: d.queue, Body: body}
}

// holdfast drains to the broker with default settings throughout.
func (d *drain) holdfast(keys int) drainRun {
	return func(ctx context.Context, n int, watch *stopwatch) int {
		d.fill(ctx, n, keys)
		check(d.withPublisher(ctx, func(publisher *outboxamqp.Publisher) error {
			return d.relay(ctx, publisher, n, watch)
		}))
		return n
	}
}

// relay runs a relay until it has published n messages.
func (d *drain) relay(ctx context.Context, publisher driver.Publisher, n int, watch *stopwatch) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var mu sync.Mutex
	published := 0
	store := backlog.Counting{Store: d.store, Published: func(more int) {
		mu.Lock()
		defer mu.Unlock()
		if published += more; published == n {
			watch.stop()
			cancel()
		}
	}}
	relay, err := outbox.NewRelay(store, publisher, outbox.RelayConfig{Logger: quiet})
	if err != nil {
		return err
	}
	watch.start()
	return relay.Run(ctx)
}

// withPublisher runs do beside a connected publisher.
func (d *drain) withPublisher(ctx context.Context, do func(*outboxamqp.Publisher) error) error {
	publisher, err := outboxamqp.NewPublisher(outboxamqp.Dial(d.url, amqp.Config{}), outboxamqp.Config{Logger: quiet})
	if err != nil {
		return err
	}
	stop := beside(ctx, publisher.Run)
	untilReady(ctx, publisher.Ready)
	return errors.Join(do(publisher), stop())
}

func untilReady(ctx context.Context, ready func(context.Context) error) {
	for ready(ctx) != nil && runloop.Sleep(ctx, time.Millisecond) == nil {
	}
}

// beside runs services until stop is called, which returns their errors.
func beside(ctx context.Context, services ...func(context.Context) error) (stop func() error) {
	ctx, cancel := context.WithCancel(ctx)
	errs := make([]error, len(services))
	var running sync.WaitGroup
	for i, run := range services {
		running.Go(func() { errs[i] = run(ctx) })
	}
	return func() error {
		cancel()
		running.Wait()
		return errors.Join(errs...)
	}
}
