package postgres

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/messages"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
)

// NewInbox returns the inbox whose handlers keep the read model, and tell f of that.
func NewInbox(t txretry.Transactor, f flow.Flow) (*inboxpgx.Store, error) {
	store, err := inboxpgx.New(t, "stats", inboxpgx.Config{})
	if err != nil {
		return nil, err
	}
	return store, messages.Listen(store, func(ctx context.Context, tx pgx.Tx, status booking.Status, m messages.Reservation) error {
		txretry.AfterCommit(tx, func() { f.Note(flow.Updated, string(status)) })
		return learn(ctx, tx, status, m)
	})
}

// The higher rank wins, so the order in which consumers hear of a reservation does not matter.
const learnSQL = `
insert into reservation_states as known (reservation_id, event_id, status, rank, messages) values ($1, $2, $3, $4, 1)
on conflict (reservation_id) do update set
    status = case when known.rank < excluded.rank then excluded.status else known.status end,
    rank = greatest(known.rank, excluded.rank),
    messages = known.messages + 1`

// learn writes into the read model what a message says of a reservation.
func learn(ctx context.Context, tx pgx.Tx, status booking.Status, m messages.Reservation) error {
	_, err := tx.Exec(ctx, learnSQL, m.ReservationID, m.EventID, status, status.Rank())
	return err
}
