package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxredis"
)

// partitionKeys is how many ordering keys the messages have.
const partitionKeys = 1000

// split is a queue or a stream of some partitions that is ordered by key.
type split struct {
	route      outbox.Route
	setup      func(ctx context.Context) error
	publish    func(ctx context.Context, do func(driver.Publisher) error) error
	consumer   func(p inbox.Processor) (runner, error)
	partitions func(ctx context.Context) ([]int64, error) // how many messages each has
}

type runner interface {
	Setup(ctx context.Context) error
	Run(ctx context.Context) error
}

// benchScalePartitions has ordered messages relayed and consumed by way of 1, 2 and 4 queues, and as many streams.
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

// run has messages relayed and then consumed, and measures one of the two.
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
				if err := ch.ExchangeDelete(exchange, false, false); err != nil { // so that no other run's queue is bound to it
					return err
				}
				return ch.ExchangeDeclare(exchange, "topic", true, false, false, false, nil)
			})
		},
		publish: func(ctx context.Context, do func(driver.Publisher) error) error {
			return d.withPublisher(ctx, func(p *outboxamqp.Publisher) error { return do(p) })
		},
		consumer: func(p inbox.Processor) (runner, error) {
			return inboxamqp.NewConsumer(inboxamqp.Dial(d.url, amqp.Config{}), name, p, inboxamqp.Config{
				Classic: true, Partitions: partitions, Bindings: []inboxamqp.Binding{{Exchange: exchange, Key: "#"}},
				ConsumerConfig: inbox.ConsumerConfig{Ordered: true, Concurrency: scaleClients, Logger: quiet},
			})
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
			return inboxredis.NewConsumer(i.redis, name, p, inboxredis.Config{
				Partitions: partitions, ConsumerConfig: inbox.ConsumerConfig{Ordered: true, Concurrency: scaleClients, Logger: quiet},
			})
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
