package main

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry"
)

const (
	eventName   = "bench.event"
	insertEvent = "INSERT INTO bench_events (body) VALUES ($1)"
)

// intake is where the contenders empty a queue into Postgres.
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

// intakeRun takes n messages out of the queue, between the start and the stop of the watch.
type intakeRun func(ctx context.Context, n int, watch *stopwatch)

// contender has a run take in that part of the messages, fewer to warm up.
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

// fill makes every run start from empty tables and a new queue with n messages.
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

// expect is an error unless each message took effect once and left the queue.
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
