package main

import (
	"context"
	"errors"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/outbox"
)

// startRaw starts the least that does the same: notified inside the business transaction, it
// reads what there is, publishes, awaits the confirms and deletes.
func (d *drain) startRaw(ctx context.Context, j *journey) (write, func() error) {
	listening := must(d.pool.Acquire(ctx))
	must(listening.Exec(ctx, "LISTEN raw_outbox"))
	conn := must(amqp.Dial(d.url))
	ch := must(conn.Channel())
	check(ch.Confirm(false))
	stop := beside(ctx, func(ctx context.Context) error {
		for {
			if _, err := listening.Conn().WaitForNotification(ctx); err != nil {
				return nil // the end of ctx
			}
			if err := d.relayRaw(context.WithoutCancel(ctx), ch, j); err != nil {
				return err
			}
		}
	})
	store := func(ctx context.Context, tx pgx.Tx, msgs ...outbox.Message) error {
		_, err := tx.Exec(ctx, "WITH i AS (INSERT INTO raw_outbox VALUES ($1, $2)) SELECT pg_notify('raw_outbox', '')", msgs[0].ID, msgs[0].Body)
		return err
	}
	return store, func() error {
		err := stop()
		_ = listening.Conn().Close(context.WithoutCancel(ctx)) // its wait was broken off
		listening.Release()
		return errors.Join(err, conn.Close())
	}
}

func (d *drain) relayRaw(ctx context.Context, ch *amqp.Channel, j *journey) error {
	type row struct {
		ID   uuid.UUID
		Body []byte
	}
	rows, err := d.pool.Query(ctx, "SELECT id, body FROM raw_outbox ORDER BY id LIMIT 100")
	if err != nil {
		return err
	}
	messages, err := pgx.CollectRows(rows, pgx.RowToStructByPos[row])
	if err != nil {
		return err
	}
	var sent []uuid.UUID
	var confirms []*amqp.DeferredConfirmation
	for _, m := range messages {
		c, err := ch.PublishWithDeferredConfirm("", d.queue, true, false, amqp.Publishing{DeliveryMode: amqp.Persistent, MessageId: m.ID.String(), Body: m.Body})
		if err != nil {
			return err
		}
		sent, confirms = append(sent, m.ID), append(confirms, c)
	}
	for i, c := range confirms {
		if !c.Wait() {
			return errNotConfirmed
		}
		j.note(j.confirmed, sent[i])
	}
	_, err = d.pool.Exec(ctx, "DELETE FROM raw_outbox WHERE id = ANY($1)", sent)
	return err
}
