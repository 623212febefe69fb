package postgres

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
)

const lockAnyFreeSQL = `
select number from seats
where event_id = $1 and state = 'free'
order by number limit $2
for update skip locked`

// LockAnyFree implements booking.SeatBook. Too few are let go again by the savepoint:
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
