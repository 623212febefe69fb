package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/ThreeDotsLabs/watermill"
	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v3/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
)

// watermillID is the header in which watermill expects a message's id.
const watermillID = wamqp.DefaultMessageUUIDHeaderKey

// watermill runs its router with as many handlers, since each takes one message at a time,
// and the transaction of the raw consumer in them. Its own deduplicator is in memory.
func (i *intake) watermill(handlers int) intakeRun {
	return func(ctx context.Context, n int, watch *stopwatch) {
		logger := watermill.NopLogger{}
		cfg := wamqp.NewDurableQueueConfig(i.url)
		cfg.Consume.Qos.PrefetchCount = 50
		subscriber := must(wamqp.NewSubscriber(cfg, logger))
		router := must(message.NewRouter(message.RouterConfig{}, logger))
		done := newFinish(n, watch)
		for h := range handlers {
			router.AddConsumerHandler(fmt.Sprint("bench", h), i.queue, subscriber, func(m *message.Message) error {
				if err := i.watermillOne(m); err != nil {
					return err
				}
				done.one()
				return nil
			})
		}
		running, cancel := context.WithCancel(ctx)
		defer cancel()
		ended := make(chan error, 1)
		watch.start()
		go func() { ended <- router.Run(running) }()
		check(errors.Join(done.wait(ctx), router.Close(), <-ended, subscriber.Close()))
	}
}

func (i *intake) watermillOne(m *message.Message) error {
	ctx := m.Context()
	var v string
	if err := json.Unmarshal(m.Payload, &v); err != nil {
		return err
	}
	return pgx.BeginTxFunc(ctx, i.pool, pgx.TxOptions{BeginQuery: rawBegin}, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, rawDedup, "watermill", m.UUID)
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
		_, err = tx.Exec(ctx, insertEvent, v)
		return err
	})
}
