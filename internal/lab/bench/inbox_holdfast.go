package main

import (
	"context"
	"sync"

	"github.com/jackc/pgx/v5"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
)

// holdfast runs a consumer until it has processed n messages.
func (i *intake) holdfast(workers, batch int, newProcessor func() inbox.Processor) intakeRun {
	return func(ctx context.Context, n int, watch *stopwatch) {
		processor := newProcessor()
		// As for the raw consumer the watch starts when there is a connection.
		start := sync.OnceFunc(watch.start)
		dial := func(context.Context) (*amqp.Connection, error) {
			conn, err := amqp.Dial(i.url)
			start()
			return conn, err
		}
		consumer := must(inboxamqp.NewConsumer(dial, i.queue, processor, inboxamqp.Config{
			ConsumerConfig: inbox.ConsumerConfig{Concurrency: workers, Batch: batch, MessageLimit: n, Logger: quiet},
		}))
		defer watch.stop()
		check(consumer.Run(ctx))
	}
}

func (i *intake) event(ctx context.Context, tx pgx.Tx, v string) error {
	_, err := tx.Exec(ctx, insertEvent, v)
	return err
}

// perMessage has dedup and effect in one transaction.
func (i *intake) perMessage() inbox.Processor {
	p := must(inboxpgx.New(i.manager, "bench", inboxpgx.Config{}))
	check(inboxpgx.Handle(p, eventName, i.event))
	return p
}

// batchHandler is that with one statement for all messages.
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
