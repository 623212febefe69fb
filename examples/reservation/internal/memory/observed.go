package memory

import (
	"context"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// observed tells of the messages that were stored.
type observed struct {
	Outbox
	wrote func(m outbox.Message, at time.Time)
}

// Write implements Outbox.
func (o observed) Write(ctx context.Context, tx pgx.Tx, msgs ...outbox.Message) error {
	if o.wrote == nil {
		return o.Outbox.Write(ctx, tx, msgs...)
	}
	at := clock()
	for i := range msgs {
		if msgs[i].ID == uuid.Nil {
			msgs[i].ID = uuid.Must(uuid.NewV7())
		}
		if err := atCommit(tx, func() { o.wrote(msgs[i], at) }); err != nil {
			return err
		}
	}
	return o.Outbox.Write(ctx, tx, msgs...)
}

// atCommit calls fn as soon as the transaction is durable.
func atCommit(tx pgx.Tx, fn func()) error {
	return txretrytest.EffectAtCommit(tx, func() error { return nil }, nil, fn)
}
