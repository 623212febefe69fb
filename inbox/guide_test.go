package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
)

// The code of README.md. The functions are compiled, not called.
var (
	_ = guideConsumer
	_ = guideBatch
	_ = guidePrepared
	_ = guideErrors
	_ = guideRedis
	_ = guideStreams
	_ = guideOperator
	_ = guideGroups
	_ = guideOrder
	_ = guidePartitions
	_ = guideLimited
	_ = timed
	_ = guideScarce
	_ = guideSlow
)

type invoice struct {
	Order string `json:"order"`
	Cents int    `json:"cents"`
}

func guideConsumer(ctx context.Context, manager *txretry.Manager, dial func(context.Context) (*amqp.Connection, error)) error {
	books, err := inboxpgx.New(manager, "billing", inboxpgx.Config{})
	if err != nil {
		return err
	}
	err = inboxpgx.Handle(books, "order.placed", func(ctx context.Context, tx pgx.Tx, o invoice) error {
		_, err := tx.Exec(ctx, "INSERT INTO invoices (order_id, cents) VALUES ($1, $2)", o.Order, o.Cents)
		return err
	})
	if err != nil {
		return err
	}
	consumer, err := inboxamqp.NewConsumer(dial, "billing", books, inboxamqp.Config{
		Bindings: []inboxamqp.Binding{{Exchange: "shop", Key: "order.*"}},
	})
	if err != nil {
		return err
	}
	if err := errors.Join(books.Migrate(ctx), consumer.Setup(ctx)); err != nil { // safe in many processes at once
		return err
	}
	return consumer.Run(ctx)
}

func guideBatch(books *inboxpgx.Store) error {
	return inboxpgx.HandleBatch(books, "order.placed", func(ctx context.Context, tx pgx.Tx, items []inboxpgx.Item[invoice]) error {
		rows := make([][]any, len(items))
		for i, item := range items {
			rows[i] = []any{item.Value.Order, item.Value.Cents}
		}
		_, err := tx.CopyFrom(ctx, pgx.Identifier{"invoices"}, []string{"order_id", "cents"}, pgx.CopyFromRows(rows))
		return err
	})
}

func rateOf(context.Context) (float64, error) { return 1, nil }

func guidePrepared(books *inboxpgx.Store) error {
	prepare := func(ctx context.Context, o invoice) (rate float64, err error) {
		return rateOf(ctx) // a call to another system, while no connection is held
	}
	return inboxpgx.HandlePrepared(books, "order.placed", prepare, func(ctx context.Context, tx pgx.Tx, o invoice, rate float64) error {
		_, err := tx.Exec(ctx, "INSERT INTO invoices (order_id, euros) VALUES ($1, $2)", o.Order, float64(o.Cents)*rate)
		return err
	})
}

func guideErrors(resp *http.Response) error {
	switch resp.StatusCode {
	case http.StatusOK:
		return nil
	case http.StatusTooManyRequests:
		seconds, _ := strconv.Atoi(resp.Header.Get("Retry-After"))
		return inbox.RetryAfter(errors.New("gateway is busy"), time.Duration(seconds)*time.Second)
	case http.StatusPaymentRequired:
		return inbox.Classed(inbox.Unrecoverable(errors.New("card declined")), "payment")
	}
	return fmt.Errorf("gateway: %s", resp.Status) // retried after 1, 2, 4, 8 and 16 s
}

func guideRedis(client redis.UniversalClient, mux *inbox.Mux, books *inboxpgx.Store) (alone, before inbox.Processor, err error) {
	alone, err = inboxredis.NewProcessor(client, mux, inboxredis.ProcessorConfig{Namespace: "mailer"})
	if err != nil {
		return nil, nil, err
	}
	before, err = inboxredis.NewProcessor(client, books, inboxredis.ProcessorConfig{Namespace: "billing"})
	return alone, before, err
}

func guideOperator(ctx context.Context, consumer *inboxamqp.Consumer) error {
	letters := consumer.DeadLetters()
	failed := inbox.Filter{Class: "payment", FailedBefore: time.Now()}
	n, err := letters.Count(ctx, failed)
	if err != nil {
		return err
	}
	fmt.Println(n, "to return")
	done, err := letters.Replay(ctx, failed, inbox.Replay{By: "ann", Reason: "the gateway is back", PerSecond: 20})
	fmt.Printf("%+v\n", done)
	return err
}

func guideOrder(dial func(context.Context) (*amqp.Connection, error), books *inboxpgx.Store) (*inboxamqp.Consumer, error) {
	return inboxamqp.NewConsumer(dial, "billing", books, inboxamqp.Config{ConsumerConfig: inbox.ConsumerConfig{
		Ordered:  true, // of one key one at a time, in order, also through retries
		ParkKeys: true, // a key waits behind its dead letter until that is replayed or removed
	}})
}

func guidePartitions(dial func(context.Context) (*amqp.Connection, error), books *inboxpgx.Store) (*inboxamqp.Consumer, error) {
	return inboxamqp.NewConsumer(dial, "orders", books, inboxamqp.Config{
		ConsumerConfig: inbox.ConsumerConfig{Ordered: true},
		Partitions:     4, // the queues orders.0 to orders.3; all messages of a key are in one of them
		Bindings:       []inboxamqp.Binding{{Exchange: "shop", Key: "order.*"}},
	})
}

func guideGroups(ctx context.Context, letters inbox.DeadLetters) error {
	kinds, err := letters.Groups(ctx, inbox.Filter{FailedAfter: time.Now().Add(-time.Hour)})
	if err != nil || len(kinds) == 0 {
		return err
	}
	worst := kinds[0] // of which there are most
	fmt.Println(worst.Count, worst.Sample.ErrorType, worst.Sample.Error)
	_, err = letters.Remove(ctx, inbox.Filter{Fingerprint: worst.Fingerprint}, inbox.Removal{By: "ann", Reason: "test data"})
	return err
}

func guideScarce(manager *txretry.Manager) (*inboxpgx.Store, error) {
	return inboxpgx.New(manager, "billing", inboxpgx.Config{ByName: map[string]inboxpgx.HandlerConfig{
		"report.requested": {Concurrency: 2},
	}})
}

func guideSlow(dial func(context.Context) (*amqp.Connection, error), books *inboxpgx.Store, store *outboxpgx.Store) (quick, slow *inboxamqp.Consumer, err error) {
	err = inboxpgx.Handle(books, "order.placed", func(ctx context.Context, tx pgx.Tx, o invoice) error {
		m, err := outbox.NewMessage("report.requested", o) // what takes long is a message of its own
		if err != nil {
			return err
		}
		return store.Write(ctx, tx, m)
	})
	if err != nil {
		return nil, nil, err
	}
	quick, err = inboxamqp.NewConsumer(dial, "billing", books, inboxamqp.Config{
		Bindings: []inboxamqp.Binding{{Exchange: "shop", Key: "order.*"}},
	})
	if err != nil {
		return nil, nil, err
	}
	slow, err = inboxamqp.NewConsumer(dial, "billing.reports", books, inboxamqp.Config{
		ConsumerConfig: inbox.ConsumerConfig{Concurrency: 2, Prefetch: 2, HandlerTimeout: 10 * time.Minute},
		Bindings:       []inboxamqp.Binding{{Exchange: "shop", Key: "report.*"}},
	})
	return quick, slow, err
}

func timed(log *slog.Logger) inbox.Middleware {
	return func(ctx context.Context, m *inbox.Message) (context.Context, func(result error) error, error) {
		begun := time.Now()
		return ctx, func(result error) error {
			log.InfoContext(ctx, "processed", slog.String("name", m.Name), slog.Duration("took", time.Since(begun)), slog.Any("error", result))
			return result
		}, nil
	}
}

func guideLimited(manager *txretry.Manager, limit inbox.Waiter) (*inboxpgx.Store, error) {
	return inboxpgx.New(manager, "mailer", inboxpgx.Config{ByName: map[string]inboxpgx.HandlerConfig{
		"order.placed": {Waiter: limit, Timeout: 10 * time.Second},
	}})
}

func guideStreams(ctx context.Context, client *redis.Client, books *inboxpgx.Store) error {
	consumer, err := inboxredis.NewConsumer(client, "orders", books, inboxredis.Config{Group: "billing"})
	if err != nil {
		return err
	}
	if err := consumer.Setup(ctx); err != nil { // the stream and its group
		return err
	}
	return consumer.Run(ctx)
}
