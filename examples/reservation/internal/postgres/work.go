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

// work is booking.Work on one transaction.
type work struct {
	tx     pgx.Tx
	outbox Outbox
	holds  Holds
	now    time.Time // set by a statement
}

var _ booking.Work = (*work)(nil)

// Now returns the start of the transaction, as SQL's now(), or the time after the last lock.
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

// Outbox stores messages in the transaction of their change; *outboxpgx.Store implements it.
type Outbox interface {
	Write(ctx context.Context, tx pgx.Tx, msgs ...outbox.Message) error
}

// Holds schedules the expiry of reservations; *expirypgx.Store implements it.
type Holds interface {
	// Due wakes the sweeper at the deadline, after the commit.
	Due(tx pgx.Tx, deadline time.Time) bool
}

// Two transactions that want the same seats lock them in the same order.
const lockSeatsSQL = `
select from seats where event_id = $1 and number = any($2) order by number for update`

const takeSeatsSQL = `
update seats set state = 'held', reservation_id = $3, held_until = $4
where event_id = $1 and number = any($2) and state = 'free'`

const addReservationSQL = `
insert into reservations (id, event_id, user_id, seats, status, expires_at)
values ($1, $2, $3, $4, $5, $6)`

// AddReservation implements booking.ReservationBook. It fails with a serialization error if a seat has changed since
// the transaction began.
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

// LockReservation implements booking.ReservationBook. It reads the clock after it has the lock, because the hold may have
// expired during the wait.
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

// affects fails the transaction if a statement changes another number of rows.
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

const lockAnyFreeSQL = `
select number from seats
where event_id = $1 and state = 'free'
order by number limit $2
for update skip locked`

// LockAnyFree implements booking.SeatBook. If there are too few seats, the savepoint releases their locks:
// two transactions that keep some and wait for more would wait for each other.
func (w *work) LockAnyFree(ctx context.Context, eventID string, n int) ([]int, error) {
	var numbers []int
	var b pgx.Batch
	b.Queue("savepoint before_lock")
	b.Queue(lockAnyFreeSQL, eventID, n).Query(func(rows pgx.Rows) (err error) {
		numbers, err = pgx.CollectRows(rows, pgx.RowTo[int])
		return err
	})
	if err := w.tx.SendBatch(ctx, &b).Close(); err != nil || len(numbers) == n {
		return numbers, err
	}
	_, err := w.tx.Exec(ctx, "rollback to savepoint before_lock")
	return nil, err
}

const openSeatsSQL = `
select number, state, coalesce(reservation_id::text, ''), coalesce(held_until, 'epoch') from seats
where event_id = $1 and (state = 'free' or held_until <= now())
order by number limit $2`

// OpenSeats implements booking.SeatBook.
func (w *work) OpenSeats(ctx context.Context, eventID string, n int) ([]booking.Seat, error) {
	return collectSeats(w.tx.Query(ctx, openSeatsSQL, eventID, n))
}

const seatsSQL = `
select number, state, coalesce(reservation_id::text, ''), coalesce(held_until, 'epoch'), now() from seats
where event_id = $1 and number = any($2)
order by number`

// Seats implements booking.SeatBook.
func (w *work) Seats(ctx context.Context, eventID string, numbers []int) ([]booking.Seat, error) {
	if !validID(eventID) {
		return nil, nil
	}
	rows, err := w.tx.Query(ctx, seatsSQL, eventID, numbers)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (s booking.Seat, err error) {
		err = row.Scan(&s.Number, &s.State, &s.ReservationID, &s.HeldUntil, &w.now)
		return s, err
	})
}

func collectSeats(rows pgx.Rows, err error) ([]booking.Seat, error) {
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (booking.Seat, error) {
		var s booking.Seat
		err := row.Scan(&s.Number, &s.State, &s.ReservationID, &s.HeldUntil)
		return s, err
	})
}
