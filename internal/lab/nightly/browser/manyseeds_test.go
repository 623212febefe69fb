package browser_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/page"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

var quiet = inbox.ConsumerConfig{Logger: slog.New(slog.DiscardHandler)}

// kinds are those of the letters.
const kinds = 20

// consumer is one on any broker.
type consumer interface{ operator.DeadLetterer }

// consumerOf has dead letters of these names in memory, and does not run any more.
func consumerOf(t *testing.T, names ...string) consumer {
	t.Helper()
	broker, mux := inboxtest.NewBroker(), inbox.NewMux()
	mux.Fallback(func(_ context.Context, m *inbox.Message) error {
		return inbox.Unrecoverable(errors.New("no handler for " + m.Name))
	})
	c, err := inboxtest.NewConsumer(broker, "billing", mux, inboxtest.Config{ConsumerConfig: quiet})
	check(t, err)
	for _, name := range names {
		check(t, broker.Send(t.Context(), &inbox.Message{ID: ids.New(), Name: name, Body: []byte("{}")}))
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- c.Run(ctx) }()
	err = broker.Idle(t.Context())
	stop()
	check(t, errors.Join(err, <-ended))
	return c
}

// rabbitConsumer has so many dead letters of all kinds on RabbitMQ, and does not run.
func rabbitConsumer(t *testing.T, letters int) consumer {
	t.Helper()
	const queue = "billing.failed.default"
	broker := amqptest.New(t)
	c, err := inboxamqp.NewConsumer(broker.Dial, "billing", inbox.NewMux(), inboxamqp.Config{ConsumerConfig: quiet})
	check(t, err)
	check(t, c.Setup(t.Context()))
	ch := broker.Channel(t)
	for n := range letters {
		check(t, ch.PublishWithContext(t.Context(), "", queue, false, false, rabbitLetter(n)))
	}
	testenv.Eventually(t, func() error {
		if got := broker.Depth(t, queue); got != letters {
			return fmt.Errorf("%d of %d letters are there", got, letters)
		}
		return nil
	})
	return c
}

// redisConsumer has so many dead letters of all kinds on Redis Streams, and does not run.
func redisConsumer(t *testing.T, letters int) consumer {
	t.Helper()
	const stream, atOnce = "shop", 1000
	client := redistest.New(t)
	c, err := inboxredis.NewConsumer(client, stream, inbox.NewMux(), inboxredis.Config{ConsumerConfig: quiet, Group: "billing"})
	check(t, err)
	check(t, c.Setup(t.Context()))
	pipe := client.Pipeline()
	for n := range letters {
		pipe.XAdd(t.Context(), &redis.XAddArgs{Stream: "{" + stream + "}:billing:failed.unrecoverable", Values: redisLetter(n)})
		if n%atOnce == atOnce-1 || n == letters-1 {
			_, err := pipe.Exec(t.Context())
			check(t, err)
		}
	}
	return c
}

// redisLetter is a dead letter as a consumer stores it.
func redisLetter(n int) []any {
	like := rabbitLetter(n)
	fields := []any{
		"id", like.MessageId, "name", like.Type, "content-type", like.ContentType, "created-at", like.Timestamp.UTC().Format(time.RFC3339Nano), "body", like.Body,
	}
	for name, value := range like.Headers {
		if name != "holdfast-origin-queue" { // of RabbitMQ alone
			fields = append(fields, name, value)
		}
	}
	return fields
}

// rabbitLetter is a dead letter as a consumer publishes it.
func rabbitLetter(n int) amqp.Publishing {
	kind, failed := n%kinds, time.Now().UTC().Add(-time.Minute).Format(time.RFC3339Nano)
	return amqp.Publishing{
		MessageId: ids.New().String(), Type: fmt.Sprintf("order.kind-%d", kind), ContentType: "application/json", DeliveryMode: amqp.Persistent,
		Timestamp: time.Now(), Body: []byte(`{"order":` + strconv.Itoa(n) + `}`),
		Headers: amqp.Table{
			"holdfast-attempt": "1", "holdfast-failure-class": "unrecoverable", "holdfast-error": "no handler", "holdfast-error-type": "*errors.errorString",
			"holdfast-fingerprint": fmt.Sprintf("%016d", kind), "holdfast-first-failed-at": failed, "holdfast-last-failed-at": failed,
			"holdfast-consumer": "billing", "holdfast-origin-queue": "billing",
		},
	}
}

// postgresOutbox has so many dead letters of all kinds.
func postgresOutbox(t *testing.T, letters int) *outboxpgx.Store {
	t.Helper()
	pool, schema := pgtest.NewSchema(t)
	store, err := outboxpgx.New(pool, outboxpgx.Config{Schema: schema, Logger: quiet.Logger})
	check(t, err)
	check(t, store.Migrate(t.Context()))
	_, err = pool.Exec(t.Context(), `
		INSERT INTO holdfast_outbox_dead (id, seq, lane, name, body, content_type, ordering_key, transport_name, exchange, routing_key, created_at, attempts, error_class, last_error)
		SELECT encode(set_bit(set_bit(set_byte(uuid_send(gen_random_uuid()), 6, 112), 0, 0), 1, 0), 'hex')::uuid, n, n % 16, 'order.kind-' || n % $2,
		  convert_to('{"order":' || n || '}', 'UTF8'), 'application/json', 'customer ' || n % 1000, '', '', '', now(), 5, 'permanent', 'no exchange for order ' || n
		FROM generate_series(1, $1::int) n`, letters, kinds)
	check(t, err)
	return store
}

// site is an operator's page in this process, and its address.
func site(t *testing.T, cfg operator.Config) (url string) {
	t.Helper()
	cfg.Log = &operator.MemoryLog{}
	handler, err := page.New(cfg, page.Config{Authorize: func(*http.Request) (operator.Access, error) {
		return operator.Access{By: "ada", Bodies: true, Change: true}, nil
	}})
	check(t, err)
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	t.Cleanup(handler.Close)
	return server.URL + "/"
}
