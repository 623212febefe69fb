package main

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"net/http"
	"os"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/lab/backlog"
	"github.com/holdfast-go/holdfast/internal/lab/load"
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxredis"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
	"github.com/holdfast-go/holdfast/txretry"
)

func scaleWorkload() workload {
	return workload{scaleOnly, []part{
		{"messages", alone(benchScaleMessages)},
		{"requests", alone(benchScaleRequests)},
		{"partitions", alone(benchScalePartitions)},
		{"tables", alone(benchScaleTables)},
		{"shards", alone(benchScaleShards)},
		{"cluster", alone(benchScaleCluster)},
	}}
}

// alone runs a part on its own private servers, whose processor time can be read.
func alone(part func(context.Context, *bench)) func(context.Context, *bench) {
	return func(ctx context.Context, b *bench) {
		for _, variable := range []string{testenv.PostgresVar, testenv.RedisVar, testenv.AMQPVar} {
			if os.Getenv(variable) != "" {
				check(errors.New("scale reads the processor time of servers of its own: unset " + variable))
			}
		}
		own := *b
		own.servers = servers{}
		defer func() {
			err := own.close()
			b.atEnd(func() error { return err })
		}()
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		part(ctx, &own)
	}
}

// scaleClients is enough to keep a server busy.
const scaleClients = 8

// driven makes clients repeat an operation.
func (b *bench) driven(name string, op func(ctx context.Context, worker int) error) contender {
	return contender{name, func(ctx context.Context, length time.Duration) sample {
		watch := stopwatch{bench: b}
		watch.start()
		l, err := load.Drive(ctx, scaleClients, length, op)
		watch.stop()
		check(errors.Join(err, watch.err))
		return watch.sample(l.Done)
	}}
}

// only selects columns by their index in sampleColumns.
func (t table) only(places ...int) table {
	for _, place := range places {
		t.columns = append(t.columns, sampleColumns[place])
	}
	all := t.contenders
	t.contenders = nil
	for _, c := range all {
		t.contenders = append(t.contenders, contender{c.name, func(ctx context.Context, length time.Duration) sample {
			whole := c.run(ctx, length)
			var some sample
			for _, place := range places {
				some = append(some, whole[place])
			}
			return some
		}})
	}
	return t
}

// benchScaleTables records messages in a partitioned inbox table, as an administrator can make one, and in a plain one.
func benchScaleTables(ctx context.Context, b *bench) {
	t := table{title: "scale, an inbox entry in a table of partitions"}
	for _, parts := range []int{1, 4, 16} {
		pool := b.postgres(ctx)
		manager := must(txretry.New(pool, txretry.Config{Logger: quiet}))
		store := must(inboxpgx.New(manager, "bench", inboxpgx.Config{Logger: quiet}))
		check(inboxpgx.Handle(store, eventName, func(context.Context, pgx.Tx, string) error { return nil }))
		check(store.Migrate(ctx))
		name := "one table"
		if parts > 1 {
			name = fmt.Sprintf("%d partitions by hash", parts)
			splitInbox(ctx, pool, parts)
		}
		t.contenders = append(t.contenders, b.driven(name, func(ctx context.Context, _ int) error {
			return store.Process(ctx, []*inbox.Message{{ID: ids.New(), Name: eventName, Body: body}})[0]
		}))
	}
	b.measure(ctx, t.only(0, 1, 2))
}

// splitInbox replaces the table by one with the given number of partitions.
func splitInbox(ctx context.Context, pool *pgxpool.Pool, parts int) {
	for _, sql := range []string{
		`ALTER TABLE holdfast_inbox RENAME TO plain`,
		`CREATE TABLE holdfast_inbox (LIKE plain INCLUDING DEFAULTS, PRIMARY KEY (consumer, message_id)) PARTITION BY HASH (consumer, message_id)`,
		`CREATE INDEX ON holdfast_inbox (consumer, processed_at)`,
	} {
		must(pool.Exec(ctx, sql))
	}
	for n := range parts {
		sql := fmt.Sprintf(`CREATE TABLE entries_%d PARTITION OF holdfast_inbox FOR VALUES WITH (MODULUS %d, REMAINDER %d)`, n, parts, n)
		must(pool.Exec(ctx, sql))
	}
}

// shard is a database with its own outbox.
type shard struct {
	pool  *pgxpool.Pool
	store *outboxpgx.Store
}

// benchScaleShards runs writers and relays on one Postgres, and on two, chosen by customer.
func benchScaleShards(ctx context.Context, b *bench) {
	var all []shard
	for range 2 {
		server := b.launch(ctx, testenv.Postgres)
		cfg := must(pgxpool.ParseConfig(server.URL()))
		cfg.MaxConns = maxConns
		pool := b.pool(ctx, cfg)
		store := must(outboxpgx.New(pool, outboxpgx.Config{Logger: quiet}))
		check(store.Migrate(ctx))
		all = append(all, shard{pool, store})
	}
	t := table{
		title:      "scale, a message written and published, by the number of databases",
		contenders: []contender{b.sharded("one Postgres", all[:1]), b.sharded("two Postgres", all)},
	}
	b.measure(ctx, t.only(0, 1, 2, 5))
}

// sharded makes each client write for one customer after another, while one relay per shard publishes.
func (b *bench) sharded(name string, shards []shard) contender {
	var customers atomic.Int64
	c := b.driven(name, func(ctx context.Context, _ int) error {
		customer := "customer " + strconv.FormatInt(customers.Add(1)%10_000, 10)
		s := shards[crc32.ChecksumIEEE([]byte(customer))%uint32(len(shards))]
		return pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
			return s.store.Write(ctx, tx, outbox.Message{Name: eventName, Key: customer, Body: body})
		})
	})
	return withRelays(c, shards)
}

func withRelays(c contender, shards []shard) contender {
	return contender{c.name, func(ctx context.Context, length time.Duration) sample {
		var relays []func(context.Context) error
		for _, s := range shards {
			relay := must(outbox.NewRelay(s.store, backlog.Confirms{}, outbox.RelayConfig{Logger: quiet}))
			relays = append(relays, relay.Run)
		}
		stop := beside(ctx, relays...)
		result := c.run(ctx, length)
		check(stop())
		return result
	}}
}

// benchScaleCluster keeps limits and keys in one Redis, and in a cluster of three.
func benchScaleCluster(ctx context.Context, b *bench) {
	single := b.launch(ctx, testenv.Redis)
	opts := must(redis.ParseURL(single.URL()))
	one := redis.NewClient(opts)
	b.atEnd(one.Close)
	var nodes []*testenv.Server
	for range 3 {
		node := b.launch(ctx, testenv.Redis, redistest.ClusterFlags...)
		nodes = append(nodes, node)
	}
	three := must(redistest.Join(ctx, nodes))
	b.atEnd(three.Close)
	t := table{title: "scale, limits and keys by the number of Redis"}
	for _, on := range []struct {
		name   string
		client redis.UniversalClient
		tags   []string
	}{
		{"one Redis", one, []string{""}},
		{"a cluster of three", three, []string{"rl"}},
		{"a cluster of three, 16 tags", three, tagNames(16)},
	} {
		limiters := scaleLimiters(on.client, on.tags...)
		t.contenders = append(t.contenders, b.driven("a limit for each user, "+on.name, limitUsers(limiters)))
	}
	for _, on := range []struct {
		name   string
		client redis.UniversalClient
	}{{"one Redis", one}, {"a cluster of three", three}} {
		keys := must(idempotencyredis.New(on.client, idempotencyredis.Config{Prefix: "bench:scale", Retention: recordLife}))
		keyed := behind(keys, reply)
		t.contenders = append(t.contenders, b.driven("a key, "+on.name, func(ctx context.Context, _ int) error { return send(ctx, keyed, idempotency.NewKey()) }))
	}
	b.measure(ctx, t.only(0, 1, 4, 5))
}

func tagNames(n int) (names []string) {
	for i := range n {
		names = append(names, "rl"+strconv.Itoa(i))
	}
	return names
}

// benchScaleMessages measures the cost of a message on each server: write, relay, consumer.
func benchScaleMessages(ctx context.Context, b *bench) {
	i := newIntake(ctx, b)
	s := &streamIntake{i, "holdfast_bench_" + strconv.FormatInt(time.Now().UnixNano(), 10)}
	b.atEnd(func() error { return s.clear(context.WithoutCancel(ctx)) })
	var out []contender
	for _, kind := range queueKinds {
		d := newDrain(ctx, b, kind.args)
		if len(out) == 0 {
			out = append(out, b.driven("written, a transaction each", d.writeOne), d.contender("relay to a Redis stream", 1, d.toStream(i)))
		}
		out = append(out, d.contender("relay to a "+kind.name+" queue", 1, d.holdfast(0)))
	}
	b.measure(ctx, table{
		title:   fmt.Sprintf("scale, what a message of %d bytes costs", len(body)),
		columns: sampleColumns[:5],
		contenders: append(out,
			i.contender("consumer of a classic queue, a transaction each, 8 workers", 8, i.holdfast(8, 1, i.perMessage)),
			i.contender("consumer of a classic queue, a batch handler", 1, i.holdfast(1, 200, i.batchHandler)),
			s.contender("consumer of a Redis stream, a transaction each, 8 workers", 8, s.holdfast(8, 1, i.perMessage)),
			s.contender("consumer of a Redis stream, a batch handler", 1, s.holdfast(1, 200, i.batchHandler)),
		),
	})
}

func (d *drain) writeOne(ctx context.Context, _ int) error {
	return pgx.BeginFunc(ctx, d.pool, func(tx pgx.Tx) error { return d.store.Write(ctx, tx, d.message()) })
}

// toStream drains to a Redis stream.
func (d *drain) toStream(i *intake) drainRun {
	return func(ctx context.Context, n int, watch *stopwatch) int {
		d.fill(ctx, n, 0)
		stream := "bench:" + d.queue
		publisher := must(outboxredis.NewPublisher(i.redis, outboxredis.Config{Stream: stream}))
		check(d.relay(ctx, publisher, n, watch))
		check(i.redis.Unlink(ctx, stream).Err())
		return 0
	}
}

// benchScaleRequests measures the cost of a request on each server: key, limits, and the transaction itself.
func benchScaleRequests(ctx context.Context, b *bench) {
	client, gate := b.redisKeys(ctx)
	pool := b.postgres(ctx)
	must(pool.Exec(ctx, thingsTable))
	manager := must(txretry.New(pool, txretry.Config{}))
	store := must(idempotencypgx.New(manager, idempotencypgx.Config{Gate: gate}))
	check(store.Migrate(ctx))
	limiter := scaleLimiters(client, "")
	over := func(h http.Handler) func(context.Context, int) error {
		return func(ctx context.Context, _ int) error { return send(ctx, h, idempotency.NewKey()) }
	}
	b.measure(ctx, table{
		title:   "scale, what a request costs",
		columns: sampleColumns[:5],
		contenders: []contender{
			b.driven("a transaction with one INSERT", over(transactionHandler(manager, insertThing))),
			b.driven("the same under a key, two tiers", over(behind(store, doHandler(store)))),
			b.driven("a limit for each user", limitUsers(limiter)),
			b.driven("a limit for each user and one for all", limitUsers(limiter, ratelimit.Charge{Limit: everybody})),
		},
	})
}

func doHandler(store *idempotencypgx.Store) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, err := store.Do(r.Context(), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			return created, insertThing(ctx, tx)
		})
		if err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		}
	})
}

// everybody is one counter for all users.
var everybody = ratelimit.Limit{Name: "all", Max: 100_000_000, Window: time.Hour}

// limitUsers counts a different user each time, plus further charges. A user always has the same limiter.
func limitUsers(limiters []*ratelimitredis.Limiter, further ...ratelimit.Charge) func(context.Context, int) error {
	user := ratelimit.Limit{Name: "user", Max: 1_000_000, Window: time.Hour}
	var next atomic.Int64
	return func(ctx context.Context, _ int) error {
		n := next.Add(1) % rateUsers
		charge := ratelimit.Charge{Limit: user, Key: strconv.FormatInt(n, 10)}
		_, err := limiters[n%int64(len(limiters))].Allow(ctx, append([]ratelimit.Charge{charge}, further...)...)
		return err
	}
}

// scaleLimiters returns one limiter for each tag. Their timeouts suit busy servers.
func scaleLimiters(client redis.UniversalClient, tags ...string) (all []*ratelimitredis.Limiter) {
	for _, tag := range tags {
		l := must(ratelimitredis.New(client, ratelimitredis.Config{Prefix: "bench:scale", Tag: tag, Timeout: 10 * time.Second}))
		all = append(all, l)
	}
	return all
}

// partitionKeys is the number of ordering keys.
const partitionKeys = 1000

// split is a partitioned queue or stream that is ordered by key.
type split struct {
	route      outbox.Route
	setup      func(ctx context.Context) error
	publish    func(ctx context.Context, do func(driver.Publisher) error) error
	consumer   func(p inbox.Processor) (runner, error)
	partitions func(ctx context.Context) ([]int64, error) // messages per partition
}

type runner interface {
	Setup(ctx context.Context) error
	Run(ctx context.Context) error
}

// benchScalePartitions relays and consumes ordered messages through 1, 2 and 4 queues, and as many streams.
func benchScalePartitions(ctx context.Context, b *bench) {
	i := newIntake(ctx, b)
	d := newDrain(ctx, b, nil)
	t := table{title: fmt.Sprintf("scale, ordered messages of %d keys by the number of partitions", partitionKeys)}
	for _, kind := range []struct {
		name  string
		split func(name string, partitions int) split
	}{{"RabbitMQ", d.splitQueue}, {"Redis Streams", i.splitStream}} {
		for _, what := range []string{"relay", "consumer"} {
			for _, n := range []int{1, 2, 4} {
				t.contenders = append(t.contenders, contender{fmt.Sprintf("%s, %s, partitions: %d", kind.name, what, n), func(ctx context.Context, length time.Duration) sample {
					messages := max(partitionKeys, b.portion(length, 8))
					s := kind.split("bench_"+strconv.FormatInt(time.Now().UnixNano(), 10), n)
					return s.run(ctx, d, i, messages, what == "consumer")
				}})
			}
		}
	}
	b.measure(ctx, t.only(0, 1, 2, 3, 4, 5))
}

// run relays and then consumes messages, and measures one of the two.
func (s split) run(ctx context.Context, d *drain, i *intake, messages int, consumed bool) sample {
	relay, consume := &stopwatch{bench: d.bench}, &stopwatch{bench: d.bench}
	processor := i.perMessage()
	done := newFinish(messages, consume)
	consumer := must(s.consumer(counted{processor, done}))
	check(s.setup(ctx))
	check(consumer.Setup(ctx))
	d.fillWith(ctx, messages, partitionKeys, outbox.Message{Name: eventName, Body: body, Route: s.route})
	check(s.publish(ctx, func(p driver.Publisher) error { return d.relay(ctx, p, messages, relay) }))
	sizes := must(s.partitions(ctx))
	consume.start()
	stop := beside(ctx, consumer.Run)
	check(errors.Join(done.wait(ctx), stop(), relay.err, consume.err))
	watch := relay
	if consumed {
		watch = consume
	}
	result := watch.sample(messages)
	result[len(result)-1] = 100 * float64(slices.Max(sizes)) / float64(messages)
	return result
}

// splitQueue is a queue of RabbitMQ behind a topic exchange.
func (d *drain) splitQueue(name string, partitions int) split {
	const exchange = "holdfast_bench_scale"
	return split{
		route: outbox.Route{Exchange: exchange},
		setup: func(context.Context) error {
			return d.onBroker(func(ch *amqp.Channel) error {
				if err := ch.ExchangeDelete(exchange, false, false); err != nil { // so that no queue of another run is bound to it
					return err
				}
				return ch.ExchangeDeclare(exchange, "topic", true, false, false, false, nil)
			})
		},
		publish: func(ctx context.Context, do func(driver.Publisher) error) error {
			return d.withPublisher(ctx, func(p *outboxamqp.Publisher) error { return do(p) })
		},
		consumer: func(p inbox.Processor) (runner, error) {
			return inboxamqp.NewConsumer(inboxamqp.Dial(d.url, amqp.Config{}), inboxamqp.Queue{Name: name, Classic: true, Partitions: partitions, Bindings: []inboxamqp.Binding{{Exchange: exchange, Key: "#"}}}, p, inbox.ConsumerConfig{Ordered: true, Concurrency: scaleClients / partitions, Logger: quiet})
		},
		partitions: func(ctx context.Context) (sizes []int64, err error) {
			return sizes, d.onBroker(func(ch *amqp.Channel) error {
				for _, queue := range partitionNames(name, partitions) {
					q, err := ch.QueueDeclarePassive(queue, true, false, false, false, nil)
					if err != nil {
						return err
					}
					sizes = append(sizes, int64(q.Messages))
				}
				return nil
			})
		},
	}
}

// splitStream is a stream of Redis.
func (i *intake) splitStream(name string, partitions int) split {
	name = "bench:" + name
	return split{
		setup: func(context.Context) error { return nil },
		publish: func(_ context.Context, do func(driver.Publisher) error) error {
			p, err := outboxredis.NewPublisher(i.redis, outboxredis.Config{Stream: name, Partitions: map[string]int{name: partitions}})
			if err != nil {
				return err
			}
			return do(p)
		},
		consumer: func(p inbox.Processor) (runner, error) {
			return inboxredis.NewConsumer(i.redis, inboxredis.Stream{Name: name, Partitions: partitions}, p, inbox.ConsumerConfig{Ordered: true, Concurrency: scaleClients / partitions, Logger: quiet})
		},
		partitions: func(ctx context.Context) (sizes []int64, err error) {
			for _, stream := range partitionNames(name, partitions) {
				size, err := i.redis.XLen(ctx, stream).Result()
				if err != nil {
					return nil, err
				}
				sizes = append(sizes, size)
			}
			return sizes, nil
		},
	}
}

func partitionNames(name string, partitions int) []string {
	if partitions == 1 {
		return []string{name}
	}
	return partition.Names(name, partitions)
}
