package faults_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// inboxBrokers runs a test on each kind of broker, and one by one and in batches on each.
func inboxBrokers(t *testing.T, test func(t *testing.T, b inboxBroker, batch int)) {
	t.Parallel()
	testenv.AMQPURL(t) // skips before there are subtests
	for broker, open := range map[string]func(testing.TB) inboxBroker{"RabbitMQ": onRabbitMQ, "Redis Streams": onRedis} {
		for name, batch := range map[string]int{"one by one": 1, "batches": 20} {
			t.Run(broker+"/"+name, func(t *testing.T) {
				t.Parallel()
				test(t, open(t), batch)
			})
		}
	}
}

// inboxBroker is a broker for one test.
type inboxBroker struct {
	url              string
	closeConnections func()
}

func onRabbitMQ(t testing.TB) inboxBroker {
	t.Helper()
	b := amqptest.New(t)
	return inboxBroker{b.URL, func() { b.CloseConnections(t) }}
}

func onRedis(t testing.TB) inboxBroker {
	t.Helper()
	server := testenv.Private(t, testenv.Redis)
	client := redistest.Client(t, server.URL())
	return inboxBroker{server.URL(), func() {
		must(t, client.Do(t.Context(), "CLIENT", "KILL", "TYPE", "normal").Err()) // but this one's own
	}}
}

// inboxConsumer is what the tests use of a consumer, whatever its broker.
type inboxConsumer interface {
	Setup(ctx context.Context) error
	Run(ctx context.Context) error
	DeadLetters() inbox.DeadLetters
}

func (j inboxJob) onRedis() bool { return strings.HasPrefix(j.Broker, "redis://") }

// consumer returns a consumer of the job's broker, and what ends its connections.
func (j inboxJob) consumer(p inbox.Processor, timeout time.Duration) (inboxConsumer, func(), error) {
	cfg := j.config()
	if !j.onRedis() {
		cfg.Timeout = timeout
		c, err := inboxamqp.NewConsumer(j.dial, inboxQueue, p, cfg)
		return c, func() {}, err
	}
	client, err := j.redis()
	if err != nil {
		return nil, nil, err
	}
	c, err := inboxredis.NewConsumer(client, inboxQueue, p, inboxredis.Config{Timeout: timeout, ConsumerConfig: cfg.ConsumerConfig})
	return c, func() { _ = client.Close() }, err
}

func (j inboxJob) redis() (*redis.Client, error) {
	options, err := redis.ParseURL(j.Broker)
	if err != nil {
		return nil, err
	}
	options.ContextTimeoutEnabled = true
	return redis.NewClient(options), nil
}

// useRedis does something on the job's Redis.
func (i *intake) useRedis(do func(*redis.Client) error) error {
	client, err := i.job.redis()
	if err != nil {
		return err
	}
	return errors.Join(do(client), client.Close())
}

// addAll is publish to a stream.
func (i *intake) addAll(ctx context.Context, msgs []amqp.Publishing) error {
	return i.useRedis(func(client *redis.Client) error {
		pipe := client.Pipeline()
		for _, m := range msgs {
			pipe.XAdd(ctx, entryOf(inboxQueue, m))
		}
		_, err := pipe.Exec(ctx)
		return err
	})
}

// Redis bears the streams of bad messages, too, also while a place of dead letters takes none.
func TestInboxStreamsOfBadMessagesOnRedis(t *testing.T) {
	t.Parallel()
	kinds := map[string]badStream{"dead letters refused": {fail: inbox.Unrecoverable(errStream)}}
	for name, kind := range badStreams {
		if kind.spoilQueue == nil {
			kinds[name] = kind
		}
	}
	for name, kind := range kinds {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			client := redistest.New(t)
			if name == "dead letters refused" { // the key is no stream
				must(t, client.Set(t.Context(), "{stream}:stream:failed.unrecoverable", "", 0).Err())
			}
			inPhases(t, newRedisStream(t, client, badStream{}, "control"), newRedisStream(t, client, kind, "stream"))
		})
	}
}

func newRedisStream(t *testing.T, client *redis.Client, kind badStream, name string) *stream {
	t.Helper()
	s := emptyStream(kind)
	s.publishing = func(ctx context.Context, do func(func(amqp.Publishing) error) error) error {
		return do(func(m amqp.Publishing) error { return client.XAdd(ctx, entryOf(name, m)).Err() })
	}
	c, err := inboxredis.NewConsumer(client, name, s.mux(t), inboxredis.Config{ConsumerConfig: inbox.ConsumerConfig{Logger: quiet}})
	must(t, err)
	must(t, c.Setup(t.Context()))
	beside(t, c.Run)
	untilTrue(t, "the consumer is at work", func() bool { return c.Ready(t.Context()) == nil })
	return s
}

// entryOf is a message as an entry.
func entryOf(stream string, m amqp.Publishing) *redis.XAddArgs {
	key, _ := m.Headers["holdfast-key"].(string)
	junk, _ := m.Headers["holdfast-junk"].(string)
	return &redis.XAddArgs{Stream: stream, Values: []any{
		"id", m.MessageId, "name", m.Type, "content-type", m.ContentType, "key", key, "holdfast-junk", junk, "body", m.Body,
	}}
}

// leftOnRedis counts what the group has not processed: in the stream, and of its retries.
func (i *intake) leftOnRedis(ctx context.Context) (n int, err error) {
	own := "{" + inboxQueue + "}:" + inboxQueue + ":"
	err = i.useRedis(func(client *redis.Client) error {
		for _, key := range []string{inboxQueue, own + "retries"} {
			groups, err := client.XInfoGroups(ctx, key).Result()
			if err != nil {
				return err
			}
			n += int(groups[0].Pending + groups[0].Lag)
		}
		waiting, err := client.ZCard(ctx, own+"later").Result()
		n += int(waiting)
		return err
	})
	return n, err
}
