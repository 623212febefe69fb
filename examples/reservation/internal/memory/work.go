package memory

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/messages"
	"github.com/holdfast-go/holdfast/expiry/expirytest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// Outbox stores messages in the transaction of the change they announce; *outboxtest.Store implements it.
type Outbox interface {
	Write(ctx context.Context, tx pgx.Tx, msgs ...outbox.Message) error
}

// work is booking.Work on one fake transaction. Locks need nothing: there is no second transaction beside it.
type work struct {
	*Store
	tx     pgx.Tx
	outbox Outbox
	holds  *expirytest.Store
	now    time.Time
}

// Now implements booking.Work.
func (w *work) Now(context.Context) (time.Time, error) { return w.now, nil }

// AddEvent implements booking.EventBook.
func (w *work) AddEvent(_ context.Context, e booking.Event) error {
	seats := make([]booking.Seat, e.Seats)
	for i := range seats {
		seats[i] = booking.Seat{Number: i + 1, State: booking.SeatFree}
	}
	return put(w.tx, w.events, e.ID, &event{e, seats})
}

// Event implements booking.EventBook.
func (w *work) Event(_ context.Context, id string) (booking.Event, error) {
	e, ok := w.events[id]
	if !ok {
		return booking.Event{}, booking.NotFound("event")
	}
	return e.Event, nil
}

// LockAnyFree implements booking.SeatBook.
func (w *work) LockAnyFree(_ context.Context, eventID string, n int) ([]int, error) {
	var numbers []int
	for _, seat := range w.events[eventID].seats {
		if seat.State != booking.SeatFree {
			continue
		}
		if numbers = append(numbers, seat.Number); len(numbers) == n {
			return numbers, nil
		}
	}
	return nil, nil
}

// OpenSeats implements booking.SeatBook.
func (w *work) OpenSeats(_ context.Context, eventID string, n int) ([]booking.Seat, error) {
	var open []booking.Seat
	for _, seat := range w.events[eventID].seats {
		if seat.StateAt(w.now) == booking.SeatFree && len(open) < n {
			open = append(open, seat)
		}
	}
	return open, nil
}

// Seats implements booking.SeatBook.
func (w *work) Seats(_ context.Context, eventID string, numbers []int) ([]booking.Seat, error) {
	e, ok := w.events[eventID]
	if !ok {
		return nil, nil
	}
	var seats []booking.Seat
	for _, number := range numbers {
		if number <= e.Seats {
			seats = append(seats, e.seats[number-1])
		}
	}
	return seats, nil
}

// AddReservation implements booking.ReservationBook.
func (w *work) AddReservation(ctx context.Context, r booking.Reservation) error {
	for _, number := range r.Seats {
		held := booking.Seat{Number: number, State: booking.SeatHeld, ReservationID: r.ID, HeldUntil: r.ExpiresAt}
		if err := w.setSeat(r.EventID, "", held); err != nil {
			return err
		}
	}
	w.holds.Due(w.tx, r.ExpiresAt)
	return w.write(ctx, r)
}

// LockReservation implements booking.ReservationBook.
func (w *work) LockReservation(_ context.Context, id string) (booking.Reservation, error) {
	r, ok := w.reservations[id]
	if !ok {
		return booking.Reservation{}, booking.NotFound("reservation")
	}
	return r, nil
}

// Settle implements booking.ReservationBook.
func (w *work) Settle(ctx context.Context, r booking.Reservation) error {
	for _, number := range r.Seats {
		seat := booking.Seat{Number: number, State: booking.SeatFree}
		if r.Status == booking.StatusConfirmed {
			seat.State, seat.ReservationID = booking.SeatConfirmed, r.ID
		}
		if err := w.setSeat(r.EventID, r.ID, seat); err != nil {
			return err
		}
	}
	return w.write(ctx, r)
}

// write keeps and announces a reservation.
func (w *work) write(ctx context.Context, r booking.Reservation) error {
	if err := put(w.tx, w.reservations, r.ID, r); err != nil {
		return err
	}
	m, err := messages.New(r)
	if err != nil {
		return err
	}
	return w.outbox.Write(ctx, w.tx, m)
}

func (w *work) seat(eventID string, number int) *booking.Seat {
	return &w.events[eventID].seats[number-1]
}

// setSeat changes a seat that belongs to a reservation, "" for nobody.
func (w *work) setSeat(eventID, owner string, to booking.Seat) error {
	seat := w.seat(eventID, to.Number)
	if seat.ReservationID != owner {
		return fmt.Errorf("memory: seat %s changed hands", booking.SeatName(to.Number))
	}
	old := *seat
	return txretrytest.Effect(w.tx, func() { *seat = to }, func() { *seat = old })
}

// put sets a map entry as part of a transaction.
func put[K comparable, V any](tx pgx.Tx, m map[K]V, key K, value V) error {
	old, had := m[key]
	return txretrytest.Effect(tx, func() { m[key] = value }, func() {
		if delete(m, key); had {
			m[key] = old
		}
	})
}
