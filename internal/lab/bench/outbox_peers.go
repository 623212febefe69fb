package main

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v3/pkg/amqp"
	wsql "github.com/ThreeDotsLabs/watermill-sql/v4/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

// finish stops the watch at the last of n messages.
type finish struct {
	left  atomic.Int64
	watch *stopwatch
	over  chan struct{}
}

func newFinish(n int, watch *stopwatch) *finish {
	f := &finish{watch: watch, over: make(chan struct{})}
	f.left.Store(int64(n))
	return f
}

func (f *finish) one() {
	if f.left.Add(-1) == 0 {
		f.watch.stop()
		close(f.over)
	}
}

func (f *finish) wait(ctx context.Context) error {
	select {
	case <-f.over:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(5 * time.Minute):
		return fmt.Errorf("%d messages left after five minutes", f.left.Load())
	}
}

// ownPool returns a pool of that size on the same schema, for a contender alone.
func (d *drain) ownPool(ctx context.Context, conns int32) *pgxpool.Pool {
	cfg := d.pool.Config()
	cfg.MaxConns = conns
	return must(pgxpool.NewWithConfig(ctx, cfg))
}

// River: the job publishes and waits for its confirm, over two shared channels.

func (d *drain) migrateRiver(ctx context.Context) {
	migrator := must(rivermigrate.New(riverpgxv5.New(d.pool), &rivermigrate.Config{Logger: quiet}))
	must(migrator.Migrate(ctx, rivermigrate.DirectionUp, nil))
}

type publishArgs struct {
	Body []byte `json:"body"`
}

func (publishArgs) Kind() string { return "publish" }

type publishWorker struct {
	river.WorkerDefaults[publishArgs]
	queue     string
	channels  []*amqp.Channel
	confirmed func()
}

func (w *publishWorker) Work(ctx context.Context, job *river.Job[publishArgs]) error {
	ch := w.channels[int(job.ID)%len(w.channels)]
	confirm, err := ch.PublishWithDeferredConfirm("", w.queue, true, false, amqp.Publishing{
		DeliveryMode: amqp.Persistent, ContentType: "application/json", Body: job.Args.Body,
	})
	if err != nil {
		return err
	}
	if ok, err := confirm.WaitContext(ctx); err != nil || !ok {
		return errors.Join(err, errNotConfirmed)
	}
	w.confirmed()
	return nil
}

func (d *drain) river(ctx context.Context, n int, watch *stopwatch) int {
	pool := d.ownPool(ctx, 20)
	defer pool.Close()
	conn := must(amqp.Dial(d.url))
	defer conn.Close()
	finish := newFinish(n, watch)
	client := d.riverClient(pool, conn, finish.one)
	fillRiver(ctx, client, n)
	must(pool.Exec(ctx, "VACUUM (ANALYZE) river_job"))
	watch.start()
	check(client.Start(ctx))
	check(errors.Join(finish.wait(ctx), client.Stop(context.WithoutCancel(ctx))))
	return n
}

func (d *drain) riverClient(pool *pgxpool.Pool, conn *amqp.Connection, confirmed func()) *river.Client[pgx.Tx] {
	w := &publishWorker{queue: d.queue, confirmed: confirmed, channels: make([]*amqp.Channel, 2)}
	for i := range w.channels {
		w.channels[i] = must(conn.Channel())
		check(w.channels[i].Confirm(false))
	}
	workers := river.NewWorkers()
	river.AddWorker(workers, w)
	return must(river.NewClient(riverpgxv5.New(pool), &river.Config{
		Queues:        map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 2000}},
		FetchCooldown: time.Millisecond, FetchPollInterval: 10 * time.Millisecond,
		Workers: workers, Logger: quiet,
	}))
}

func fillRiver(ctx context.Context, client *river.Client[pgx.Tx], n int) {
	const atOnce = 5000
	for first := 0; first < n; first += atOnce {
		jobs := make([]river.InsertManyParams, min(atOnce, n-first))
		for i := range jobs {
			jobs[i].Args = publishArgs{Body: body}
		}
		must(client.InsertManyFast(ctx, jobs))
	}
}

// Watermill: a topic is a table of its own with one message in flight, so many topics
// drain side by side.

const watermillTopics = 64

func watermillTopic(i int) string { return fmt.Sprintf("bench_%d", i) }

type countingPublisher struct {
	message.Publisher
	finish *finish
}

func (p countingPublisher) Publish(topic string, msgs ...*message.Message) error {
	err := p.Publisher.Publish(topic, msgs...)
	if err == nil {
		for range msgs {
			p.finish.one()
		}
	}
	return err
}

func (d *drain) watermill(ctx context.Context, n int, watch *stopwatch) int {
	pool := d.ownPool(ctx, 2*watermillTopics)
	defer pool.Close()
	logger := watermill.NopLogger{}
	// The run before may have left messages: closing rolls open batches back.
	for topic := range watermillTopics {
		must(d.pool.Exec(ctx, "DROP TABLE IF EXISTS "+watermillSchema.MessagesTable(watermillTopic(topic))))
	}
	d.fillWatermill(pool, n, logger)
	cfg := wamqp.NewDurableQueueConfig(d.url)
	cfg.Publish.ConfirmDelivery = true
	cfg.Publish.ChannelPoolSize = watermillTopics
	broker := must(wamqp.NewPublisher(cfg, logger))
	out := countingPublisher{broker, newFinish(n, watch)}
	watch.start()
	forwarders := startForwarders(ctx, pool, out)
	err := out.finish.wait(ctx)
	for _, f := range forwarders {
		err = errors.Join(err, f.Close())
	}
	check(errors.Join(err, broker.Close()))
	return n
}

var (
	watermillSchema  = wsql.PostgreSQLQueueSchema{SubscribeBatchSize: 1000}
	watermillOffsets = wsql.PostgreSQLQueueOffsetsAdapter{DeleteOnAck: true}
)

// fillWatermill spreads the messages evenly over the topics.
func (d *drain) fillWatermill(pool *pgxpool.Pool, n int, logger watermill.LoggerAdapter) {
	writer := must(wsql.NewPublisher(wsql.BeginnerFromPgx(pool), wsql.PublisherConfig{SchemaAdapter: watermillSchema, AutoInitializeSchema: true}, logger))
	for topic := range watermillTopics {
		into := forwarder.NewPublisher(writer, forwarder.PublisherConfig{ForwarderTopic: watermillTopic(topic)})
		var msgs []*message.Message
		for i := topic; i < n; i += watermillTopics {
			msgs = append(msgs, message.NewMessage(watermill.NewUUID(), body))
		}
		if len(msgs) == 0 {
			continue
		}
		check(into.Publish(d.queue, msgs...))
	}
}

func startForwarders(ctx context.Context, pool *pgxpool.Pool, out message.Publisher) []*forwarder.Forwarder {
	logger := watermill.NopLogger{}
	var started []*forwarder.Forwarder
	for topic := range watermillTopics {
		sub := must(wsql.NewSubscriber(wsql.BeginnerFromPgx(pool), wsql.SubscriberConfig{
			SchemaAdapter: watermillSchema, OffsetsAdapter: watermillOffsets,
			PollInterval: time.Millisecond, InitializeSchema: true,
		}, logger))
		f := must(forwarder.NewForwarder(sub, out, logger, forwarder.Config{ForwarderTopic: watermillTopic(topic)}))
		started = append(started, f)
		go func() { _ = f.Run(ctx) }() // ends with Close
	}
	return started
}
