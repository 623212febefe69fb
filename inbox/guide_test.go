package inbox_test

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
)

// The code of README.md and of examples/guides/dead-letters.md. The functions are only compiled.
var _ = []any{guideConsumer, guideLetters}

type invoice struct {
	Order string `json:"order"`
	Cents int    `json:"cents"`
}

func guideConsumer(ctx context.Context, manager *txretry.Manager, dial func(context.Context) (*amqp.Connection, error)) error {
	billing, err := inboxpgx.New(manager, "billing", inboxpgx.Config{})
	if err != nil {
		return err
	}
	err = inboxpgx.Handle(billing, "order.placed", func(ctx context.Context, tx pgx.Tx, o invoice) error {
		_, err := tx.Exec(ctx, "INSERT INTO invoices (order_id, cents) VALUES ($1, $2)", o.Order, o.Cents)
		return err
	})
	if err != nil {
		return err
	}
	queue := inboxamqp.Queue{Bindings: []inboxamqp.Binding{{Exchange: "shop", Key: "order.*"}}}
	consumer, err := inboxamqp.NewConsumer(dial, queue, billing, inbox.ConsumerConfig{})
	if err != nil {
		return err
	}
	if err := errors.Join(billing.Migrate(ctx), consumer.Setup(ctx)); err != nil {
		return err
	}
	return consumer.Run(ctx)
}

func guideLetters(ctx context.Context, consumer *inboxamqp.Consumer) error {
	dead := consumer.DeadLetters()
	kinds, err := dead.Groups(ctx, inbox.Filter{})
	if err != nil || len(kinds) == 0 {
		return err
	}
	worst := inbox.Filter{Fingerprint: kinds[0].Fingerprint} // the most frequent kind comes first
	_, err = dead.Replay(ctx, worst, inbox.Replay{By: "ann", Reason: "the gateway is back", PerSecond: 20})
	return err
}
