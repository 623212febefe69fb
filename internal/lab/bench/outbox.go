package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"sync"
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

	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/lab/backlog"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

func outboxWorkload() workload {
	return workload{"outbox", []part{
		{"classic", benchClassic},
		{"quorum", benchQuorum},
		{"latency", benchLatency},
	}}
}

// Names of contenders that goals use.
const (
	publishAlone  = "publish alone, raw client"
	unkeyed       = "holdfast, unkeyed"
	fewKeys       = "holdfast, 10 keys"
	riverBest     = "river, 2000 workers, fetch cooldown 1 ms"
	watermillBest = "watermill forwarder, 64 topics, batch 1000"
)

type queueKind struct {
	name string
	args amqp.Table
}

var queueKinds = [...]queueKind{{"classic", nil}, {"quorum", amqp.Table{"x-queue-type": "quorum"}}}

// benchClassic also runs the peers.
func benchClassic(ctx context.Context, b *bench) {
	d := newDrain(ctx, b, queueKinds[0].args)
	r := d.measure(ctx, "classic",
		d.contender(riverBest, 1, d.river),
		d.contender(watermillBest, 1, d.watermill),
	)
	b.atLeast(0.82, r.ratio(unkeyed, publishAlone), fmt.Sprintf("of %s, unkeyed, classic", publishAlone))
	b.atLeast(1.8, r.ratio(unkeyed, riverBest), fmt.Sprintf("x %s, unkeyed, classic", riverBest))
}

// benchQuorum also has ordered messages: a key has one message in flight.
func benchQuorum(ctx context.Context, b *bench) {
	d := newDrain(ctx, b, queueKinds[1].args)
	r := d.measure(ctx, "quorum", d.contender(fewKeys, 5, d.holdfast(10)))
	b.atLeast(0.78, r.ratio(unkeyed, publishAlone), fmt.Sprintf("of %s, unkeyed, quorum", publishAlone))
	b.atLeast(0.4, r.ratio(fewKeys, unkeyed), "of unkeyed, 10 keys, quorum")
}

// measure moves persistent messages of 512 bytes from a table to a queue, with confirms.
func (d *drain) measure(ctx context.Context, kind string, others ...contender) results {
	return d.bench.measure(ctx, table{
		title:      fmt.Sprintf("outbox, %d messages of %d bytes to a %s queue", d.bench.messages, len(body), kind),
		columns:    []string{"messages/s", "client us/message"},
		yardsticks: []string{publishAlone, unkeyed},
		contenders: append([]contender{
			d.contender(publishAlone, 1, d.publishAlone),
			d.contender("claim and settle alone", 1, d.claimAlone),
			d.contender(unkeyed, 1, d.holdfast(0)),
		}, others...),
	})
}

var body = backlog.Body(512)

var quiet = slog.New(slog.DiscardHandler)

// drain is the environment of the contenders of a drain.
type drain struct {
	brokerQueue
	bench *bench
	pool  *pgxpool.Pool
	store *outboxpgx.Store
}

// brokerQueue is a queue of RabbitMQ. Every run creates it again.
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
		// The queue's name is as long as a typical message name.
		brokerQueue: brokerQueue{b.rabbitmq(ctx), "bench." + strconv.FormatInt(time.Now().UnixNano(), 36), queue},
	}
	d.migrateRiver(ctx)
	b.atEnd(func() error { return d.onBroker(d.deleteQueue) })
	return d
}

// drainRun prepares n messages and moves them. It starts and stops the watch, and returns how many
// must be in the queue now.
type drainRun func(ctx context.Context, n int, watch *stopwatch) (queued int)

// portion returns that part of the messages, and fewer in a warm-up.
func (b *bench) portion(length time.Duration, part int) int {
	return max(1, int(float64(b.messages)*length.Seconds()/b.length.Seconds())/part)
}

// contender makes run move a part of the messages, and fewer to warm up.
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

// reset prepares a run: empty tables and a new queue.
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

// expect fails unless each message arrived once. A queue's counter lags a little.
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

// fill commits n messages with the given number of keys.
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

// holdfast drains to the broker with default settings.
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

// withPublisher runs do next to a connected publisher.
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

// beside runs services until stop is called. stop returns their errors.
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

// claimSize is the default of outbox.RelayConfig.BatchSize.
const claimSize = 500

// claimAlone is the database's part of a drain, one batch after the other.
func (d *drain) claimAlone(ctx context.Context, n int, watch *stopwatch) int {
	d.fill(ctx, n, 0)
	watch.start()
	for done := 0; done < n; {
		batch := must(d.store.Claim(ctx, driver.Claim{Limit: claimSize, Lease: 30 * time.Second}))
		outcomes := make([]driver.Settlement, len(batch.Messages))
		for i, m := range batch.Messages {
			outcomes[i] = driver.Settlement{ID: m.ID, Verdict: driver.Published}
		}
		must(d.store.Settle(ctx, batch, outcomes))
		done += len(outcomes)
	}
	watch.stop()
	return 0
}

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

// ownPool returns a pool of that size on the same schema, for one contender.
func (d *drain) ownPool(ctx context.Context, conns int32) *pgxpool.Pool {
	cfg := d.pool.Config()
	cfg.MaxConns = conns
	return must(pgxpool.NewWithConfig(ctx, cfg))
}

// River: the job publishes and waits for the confirm, over two shared channels.

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

// Watermill: a topic is its own table with one message in flight. So many topics drain in parallel.

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
	// The previous run may have left messages: closing rolls back open batches.
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

// This is the fastest set-up of the bare client, on classic and quorum queues: one connection with
// buffered writes, several channels, a window of confirms on each.
const (
	rawChannels = 4
	rawWindow   = 250
)

// publishAlone is the broker's limit, for messages with body and content type only.
func (d *drain) publishAlone(_ context.Context, n int, watch *stopwatch) int {
	conn := must(amqp.DialConfig(d.url, amqp.Config{Dial: func(network, addr string) (net.Conn, error) {
		conn, err := amqp.DefaultDial(10*time.Second)(network, addr)
		if err != nil {
			return nil, err
		}
		return amqpconn.GatherWrites(conn), nil
	}}))
	channels := make([]*amqp.Channel, rawChannels)
	for i := range channels {
		channels[i] = must(conn.Channel())
		check(channels[i].Confirm(false))
	}
	errs := make([]error, rawChannels)
	var running sync.WaitGroup
	watch.start()
	for i, ch := range channels {
		share := n / rawChannels
		if i == 0 {
			share += n % rawChannels
		}
		running.Go(func() { errs[i] = publishWindow(ch, d.queue, share, func(*amqp.Publishing) {}) })
	}
	running.Wait()
	watch.stop()
	check(errors.Join(errors.Join(errs...), conn.Close()))
	return n
}

var errNotConfirmed = errors.New("a message was not confirmed")

// publishWindow publishes n messages with at most rawWindow unconfirmed.
func publishWindow(ch *amqp.Channel, queue string, n int, complete func(*amqp.Publishing)) error {
	confirms := ch.NotifyPublish(make(chan amqp.Confirmation, rawWindow))
	open := 0
	for sent := 0; sent < n || open > 0; {
		if sent < n && open < rawWindow && len(confirms) == 0 {
			m := amqp.Publishing{DeliveryMode: amqp.Persistent, ContentType: "application/json", Body: body}
			complete(&m)
			if err := ch.Publish("", queue, false, false, m); err != nil {
				return err
			}
			sent++
			open++
			continue
		}
		if c, ok := <-confirms; !ok || !c.Ack {
			return errNotConfirmed
		}
		open--
	}
	return nil
}
