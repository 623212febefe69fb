package postgres

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
)

// work is booking.Work on one transaction.
type work struct {
	tx     pgx.Tx
	outbox Outbox
	holds  Holds
	now    time.Time // once a statement has brought it along
}

var _ booking.Work = (*work)(nil)

// Now is the start of the transaction, as SQL's now(), or the moment of the last lock that was waited for.
func (w *work) Now(ctx context.Context) (time.Time, error) {
	if !w.now.IsZero() {
		return w.now, nil
	}
	err := w.tx.QueryRow(ctx, "select now()").Scan(&w.now)
	return w.now, err
}

// AddEvent implements booking.EventBook.
func (w *work) AddEvent(ctx context.Context, e booking.Event) error {
	var b pgx.Batch
	b.Queue("insert into events (id, name, seats) values ($1, $2, $3)", e.ID, e.Name, e.Seats)
	b.Queue("insert into seats (event_id, number) select $1::uuid, n from generate_series(1, $2::integer) n", e.ID, e.Seats)
	return w.tx.SendBatch(ctx, &b).Close()
}

// Event implements booking.EventBook.
func (w *work) Event(ctx context.Context, id string) (booking.Event, error) {
	if !validID(id) {
		return booking.Event{}, booking.NotFound("event")
	}
	e := booking.Event{ID: id}
	err := w.tx.QueryRow(ctx, "select name, seats, now() from events where id = $1", id).Scan(&e.Name, &e.Seats, &w.now)
	if errors.Is(err, pgx.ErrNoRows) {
		return booking.Event{}, booking.NotFound("event")
	}
	return e, err
}
