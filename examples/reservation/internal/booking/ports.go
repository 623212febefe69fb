package booking

import (
	"context"
	"time"
)

// Shop has the settings of all use cases.
type Shop struct {
	// Hold is how long a reservation lasts before it must be confirmed.
	Hold time.Duration
	// NewID returns a new id for an event or a reservation.
	NewID func() string
}

// Work is one transaction: all of it happens or nothing, as if no other transaction
// ran at the same time. After an error that is not an *Error the transaction must be
// rolled back. Its caller decides whether to start again.
type Work interface {
	// Now returns the time of this transaction by the store's clock. It is not before the last LockReservation.
	Now(ctx context.Context) (time.Time, error)
	EventBook
	SeatBook
	ReservationBook
}

// EventBook keeps the events.
type EventBook interface {
	// AddEvent adds an event and its seats, all free.
	AddEvent(ctx context.Context, e Event) error
	// Event returns an event, or fails by NotFound.
	Event(ctx context.Context, id string) (Event, error)
}

// SeatBook finds seats. A locked seat stays as it is until the end of the transaction.
type SeatBook interface {
	// LockAnyFree locks n free seats without waiting. If it cannot lock that many at once, it locks nothing and
	// returns none, which does not mean that the seats are sold.
	LockAnyFree(ctx context.Context, eventID string, n int) ([]int, error)
	// OpenSeats returns, without locking, the first n seats that are free or overdue now.
	// It returns fewer than n only if there are not more.
	OpenSeats(ctx context.Context, eventID string, n int) ([]Seat, error)
	// Seats returns seats without locking them. Seats that do not exist are left out.
	Seats(ctx context.Context, eventID string, numbers []int) ([]Seat, error)
}

// ReservationBook keeps the reservations and writes their messages.
type ReservationBook interface {
	// AddReservation adds a held reservation, takes its seats and writes its message. It fails unless all seats are free.
	AddReservation(ctx context.Context, r Reservation) error
	// LockReservation waits for the lock of a reservation, and returns the reservation or fails by NotFound.
	LockReservation(ctx context.Context, id string) (Reservation, error)
	// Settle writes the final status of a locked, held reservation, frees or confirms its seats and writes its message.
	Settle(ctx context.Context, r Reservation) error
}

// Reader answers queries, outside of any transaction.
type Reader interface {
	// Events lists events by id, the first limit after the given id ("" = from the start).
	Events(ctx context.Context, after string, limit int) ([]Event, error)
	// EventMap returns an event and its seats as of now, or fails by NotFound.
	EventMap(ctx context.Context, id string) (EventMap, error)
	// Reservation returns a reservation as of now, or fails by NotFound.
	Reservation(ctx context.Context, id string) (Reservation, error)
	// Stats counts the reservations of an event in the read model; it fails by NotFound.
	Stats(ctx context.Context, eventID string) (Stats, error)
}
