package postgres

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/messages"
	"github.com/holdfast-go/holdfast/outbox"
)

// Outbox stores messages in the transaction of the change they announce; *outboxpgx.Store implements it.
type Outbox interface {
	Write(ctx context.Context, tx pgx.Tx, msgs ...outbox.Message) error
}

// Holds knows when reservations expire; *expirypgx.Store implements it.
type Holds interface {
	// Due wakes the sweeper in time, after the commit.
	Due(tx pgx.Tx, deadline time.Time) bool
}

// Two transactions that want some of the same seats wait for them in one order.
const lockSeatsSQL = `
select from seats where event_id = $1 and number = any($2) order by number for update`

const takeSeatsSQL = `
update seats set state = 'held', reservation_id = $3, held_until = $4
where event_id = $1 and number = any($2) and state = 'free'`

const addReservationSQL = `
insert into reservations (id, event_id, user_id, seats, status, expires_at)
values ($1, $2, $3, $4, $5, $6)`

// AddReservation implements booking.ReservationBook. A seat that somebody has changed since the transaction
// began fails it with a serialization error.
func (w *work) AddReservation(ctx context.Context, r booking.Reservation) error {
	var b pgx.Batch
	b.Queue(lockSeatsSQL, r.EventID, r.Seats)
	b.Queue(takeSeatsSQL, r.EventID, r.Seats, r.ID, r.ExpiresAt).Exec(affects(len(r.Seats)))
	b.Queue(addReservationSQL, r.ID, r.EventID, r.User, r.Seats, r.Status, r.ExpiresAt)
	if err := w.tx.SendBatch(ctx, &b).Close(); err != nil {
		return err
	}
	w.holds.Due(w.tx, r.ExpiresAt)
	return w.announce(ctx, r)
}

const reservationColumns = "id::text, event_id::text, user_id, seats, status, expires_at"

const lockReservationSQL = "select " + reservationColumns + " from reservations where id = $1 for update"

// LockReservation implements booking.ReservationBook. The clock is read again behind the lock: the hold may have run out
// while it was waited for.
func (w *work) LockReservation(ctx context.Context, id string) (booking.Reservation, error) {
	if !validID(id) {
		return booking.Reservation{}, booking.NotFound("reservation")
	}
	var r booking.Reservation
	var b pgx.Batch
	b.Queue(lockReservationSQL, id).QueryRow(func(row pgx.Row) (err error) {
		r, err = scanReservation(row)
		return err
	})
	b.Queue("select clock_timestamp()").QueryRow(func(row pgx.Row) error { return row.Scan(&w.now) })
	err := w.tx.SendBatch(ctx, &b).Close()
	return r, err
}

const settleSQL = `update reservations set status = $2 where id = $1 and status = 'held'`

const freeSeatsSQL = `
update seats set state = 'free', reservation_id = null, held_until = null
where event_id = $1 and number = any($2) and reservation_id = $3`

const confirmSeatsSQL = `
update seats set state = 'confirmed', held_until = null
where event_id = $1 and number = any($2) and reservation_id = $3`

// Settle implements booking.ReservationBook.
func (w *work) Settle(ctx context.Context, r booking.Reservation) error {
	seatsSQL := freeSeatsSQL
	if r.Status == booking.StatusConfirmed {
		seatsSQL = confirmSeatsSQL
	}
	var b pgx.Batch
	b.Queue(settleSQL, r.ID, r.Status).Exec(affects(1))
	b.Queue(seatsSQL, r.EventID, r.Seats, r.ID).Exec(affects(len(r.Seats)))
	if err := w.tx.SendBatch(ctx, &b).Close(); err != nil {
		return err
	}
	return w.announce(ctx, r)
}

func (w *work) announce(ctx context.Context, r booking.Reservation) error {
	m, err := messages.New(r)
	if err != nil {
		return err
	}
	return w.outbox.Write(ctx, w.tx, m)
}

func scanReservation(row pgx.Row) (booking.Reservation, error) {
	var r booking.Reservation
	err := row.Scan(&r.ID, &r.EventID, &r.User, &r.Seats, &r.Status, &r.ExpiresAt)
	if errors.Is(err, pgx.ErrNoRows) {
		return booking.Reservation{}, booking.NotFound("reservation")
	}
	return r, err
}

// affects makes a statement that changes another number of rows fail the transaction.
func affects(n int) func(pgconn.CommandTag) error {
	return func(tag pgconn.CommandTag) error {
		if tag.RowsAffected() != int64(n) {
			return fmt.Errorf("postgres: changed %d rows instead of %d", tag.RowsAffected(), n)
		}
		return nil
	}
}

func validID(id string) bool {
	u, err := uuid.Parse(id)
	return err == nil && u.String() == id
}
