package postgres

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
)

// Reader is booking.Reader on a pool.
type Reader struct{ pool *pgxpool.Pool }

var _ booking.Reader = Reader{}

// NewReader reads through pool.
func NewReader(pool *pgxpool.Pool) Reader { return Reader{pool} }

const (
	// readTimeout bounds one try of a read, which takes milliseconds where the server answers.
	readTimeout = 5 * time.Second
	readTries   = 3
)

// try reads, and does so again on another connection where one was silent.
func try(ctx context.Context, read func(ctx context.Context) error) (err error) {
	for range readTries {
		bounded, cancel := context.WithTimeout(ctx, readTimeout)
		err = read(bounded)
		silent := bounded.Err() != nil
		cancel()
		if err == nil || !silent || ctx.Err() != nil {
			return err
		}
	}
	return err
}

// Events implements booking.Reader.
func (r Reader) Events(ctx context.Context, after string, limit int) ([]booking.Event, error) {
	if after == "" {
		after = uuid.Nil.String()
	}
	var events []booking.Event
	err := try(ctx, func(ctx context.Context) (err error) {
		rows, err := r.pool.Query(ctx, "select id::text, name, seats from events where id > $1 order by id limit $2", after, limit)
		if err == nil {
			events, err = pgx.CollectRows(rows, pgx.RowToStructByPos[booking.Event])
		}
		return err
	})
	return events, err
}

const mapSQL = `
select number, case when held_until <= now() then 'free' else state end,
       coalesce(reservation_id::text, ''), coalesce(held_until, 'epoch')
from seats where event_id = $1 order by number`

// EventMap implements booking.Reader.
func (r Reader) EventMap(ctx context.Context, id string) (booking.EventMap, error) {
	e, err := r.event(ctx, id)
	if err != nil {
		return booking.EventMap{}, err
	}
	m := booking.EventMap{Event: e}
	err = try(ctx, func(ctx context.Context) (err error) {
		m.Map, err = collectSeats(r.pool.Query(ctx, mapSQL, id))
		return err
	})
	return m, err
}

func (r Reader) event(ctx context.Context, id string) (booking.Event, error) {
	if !validID(id) {
		return booking.Event{}, booking.NotFound("event")
	}
	e := booking.Event{ID: id}
	err := try(ctx, func(ctx context.Context) error {
		return r.pool.QueryRow(ctx, "select name, seats from events where id = $1", id).Scan(&e.Name, &e.Seats)
	})
	if errors.Is(err, pgx.ErrNoRows) {
		return booking.Event{}, booking.NotFound("event")
	}
	return e, err
}

const reservationSQL = `
select id::text, event_id::text, user_id, seats,
       case when status = 'held' and expires_at <= now() then 'expired' else status end, expires_at
from reservations where id = $1`

// Reservation implements booking.Reader.
func (r Reader) Reservation(ctx context.Context, id string) (booking.Reservation, error) {
	if !validID(id) {
		return booking.Reservation{}, booking.NotFound("reservation")
	}
	var found booking.Reservation
	err := try(ctx, func(ctx context.Context) (err error) {
		found, err = scanReservation(r.pool.QueryRow(ctx, reservationSQL, id))
		return err
	})
	return found, err
}

const statsSQL = `
select count(*) filter (where status = 'held'), count(*) filter (where status = 'confirmed'),
       count(*) filter (where status = 'cancelled'), count(*) filter (where status = 'expired')
from reservation_states where event_id = $1`

// Stats implements booking.Reader.
func (r Reader) Stats(ctx context.Context, eventID string) (booking.Stats, error) {
	if _, err := r.event(ctx, eventID); err != nil {
		return booking.Stats{}, err
	}
	var s booking.Stats
	err := try(ctx, func(ctx context.Context) error {
		return r.pool.QueryRow(ctx, statsSQL, eventID).Scan(&s.Held, &s.Confirmed, &s.Cancelled, &s.Expired)
	})
	return s, err
}
