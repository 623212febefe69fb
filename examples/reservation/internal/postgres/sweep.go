package postgres

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/messages"
	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/outbox"
)

const sweptSQL = "select " + reservationColumns + " from reservations where id = any($1)"

// The seats are those of reservations that this transaction has locked and expired.
const freeSweptSQL = `
update seats set state = 'free', reservation_id = null, held_until = null
from reservations r
where r.id = any($1) and seats.event_id = r.event_id and seats.number = any(r.seats) and seats.reservation_id = r.id`

// Swept returns what frees the seats of reservations that a sweep has expired and announces it, in the
// sweep's transaction.
func Swept(out Outbox) func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error {
	return func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error { return swept(ctx, tx, out, rows) }
}

func swept(ctx context.Context, tx pgx.Tx, out Outbox, rows []expiry.Row) error {
	ids := make([]string, len(rows))
	for i, row := range rows {
		ids[i] = row.ID
	}
	if _, err := tx.Exec(ctx, freeSweptSQL, ids); err != nil {
		return err
	}
	found, err := tx.Query(ctx, sweptSQL, ids)
	if err != nil {
		return err
	}
	expired, err := pgx.CollectRows(found, func(row pgx.CollectableRow) (booking.Reservation, error) { return scanReservation(row) })
	if err != nil {
		return err
	}
	msgs := make([]outbox.Message, len(expired))
	for i, r := range expired {
		if msgs[i], err = messages.New(r); err != nil {
			return err
		}
	}
	return out.Write(ctx, tx, msgs...)
}
