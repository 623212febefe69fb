package main

import (
	"context"
	"errors"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wsql "github.com/ThreeDotsLabs/watermill-sql/v4/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/outbox"
)

// startRiver starts a client that is notified of every job inserted.
func (d *drain) startRiver(ctx context.Context, j *journey) (write, func() error) {
	pool := d.ownPool(ctx, 20)
	client, hangUp := d.riverClient(pool, time.Second, func(args publishArgs) {
		j.note(j.confirmed, uuid.MustParse(args.ID))
	})
	check(client.Start(ctx))
	store := func(ctx context.Context, tx pgx.Tx, msgs ...outbox.Message) error {
		_, err := client.InsertTx(ctx, tx, publishArgs{msgs[0].ID.String(), msgs[0].Body}, nil)
		return err
	}
	return store, func() error {
		err := client.Stop(context.WithoutCancel(ctx))
		hangUp()
		pool.Close()
		return err
	}
}

// confirming tells a journey of the confirms of watermill.
type confirming struct {
	message.Publisher
	journey *journey
}

func (p confirming) Publish(topic string, msgs ...*message.Message) error {
	err := p.Publisher.Publish(topic, msgs...)
	if err == nil {
		for _, m := range msgs {
			p.journey.note(p.journey.confirmed, uuid.MustParse(m.UUID))
		}
	}
	return err
}

// startWatermill starts one forwarder, which polls every millisecond.
func (d *drain) startWatermill(ctx context.Context, j *journey) (write, func() error) {
	pool := d.ownPool(ctx, 4)
	d.dropWatermill(ctx)
	broker := d.watermillBroker(1)
	forwarders := startForwarders(ctx, pool, confirming{broker, j}, 1)
	<-forwarders[0].Running() // the tables are there
	store := func(_ context.Context, tx pgx.Tx, msgs ...outbox.Message) error {
		writer, err := wsql.NewPublisher(wsql.TxFromPgx(tx), wsql.PublisherConfig{SchemaAdapter: watermillSchema}, watermill.NopLogger{})
		if err != nil {
			return err
		}
		into := forwarder.NewPublisher(writer, forwarder.PublisherConfig{ForwarderTopic: watermillTopic(0)})
		return into.Publish(d.queue, message.NewMessage(msgs[0].ID.String(), msgs[0].Body))
	}
	return store, func() error {
		err := forwarders[0].Close()
		pool.Close()
		return errors.Join(err, broker.Close())
	}
}
