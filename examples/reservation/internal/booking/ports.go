package booking

import (
	"context"
	"time"
)

// Shop holds what all use cases need.
type Shop struct {
	// Hold is how long a reservation lasts before it must be confirmed.
	Hold time.Duration
	// NewID gives a new id for an event or a reservation.
	NewID func() string
}

// Work is one transaction: all of it happens or nothing does, as if no other ran
// beside it. An error that is not an *Error means that the transaction must be
// given up; whoever began it decides whether to begin again.
type Work interface {
	// Now is the moment of this transaction by the clock of the store; it is not before the last LockReservation.
	Now(ctx context.Context) (time.Time, error)
	EventBook
	SeatBook
	ReservationBook
}

// EventBook keeps the events.
type EventBook interface {
	// AddEvent adds an event and its seats, all free.
	AddEvent(ctx context.Context, e Event) error
	// Event finds an event, or fails by NotFound.
	Event(ctx context.Context, id string) (Event, error)
}

// SeatBook finds seats. A locked seat stays as it is until the end of the transaction.
type SeatBook interface {
	// LockAnyFree locks n free seats without waiting for anybody. Where that many cannot be had
	// at once it locks nothing and returns none, which does not mean that they are sold.
	LockAnyFree(ctx context.Context, eventID string, n int) ([]int, error)
	// OpenSeats looks, without locking, for the first n seats that are free or overdue now.
	// Fewer than n come back only if there are not more.
	OpenSeats(ctx context.Context, eventID string, n int) ([]Seat, error)
	// Seats looks at seats without locking. Those that do not exist are left out.
	Seats(ctx context.Context, eventID string, numbers []int) ([]Seat, error)
}

// ReservationBook keeps the reservations and what has to be told about them.
type ReservationBook interface {
	// AddReservation adds a held reservation, takes its seats and announces it. It fails unless all of them are free.
	AddReservation(ctx context.Context, r Reservation) error
	// LockReservation waits for the lock of a reservation; it fails by NotFound.
	LockReservation(ctx context.Context, id string) (Reservation, error)
	// Settle writes the final status of a locked, held reservation, frees or confirms its seats and announces it.
	Settle(ctx context.Context, r Reservation) error
}

// Reader answers questions, outside of any transaction.
type Reader interface {
	// Events lists events by id, the first limit after the given id ("" = from the start).
	Events(ctx context.Context, after string, limit int) ([]Event, error)
	// EventMap shows an event and its seats as of now; it fails by NotFound.
	EventMap(ctx context.Context, id string) (EventMap, error)
	// Reservation shows a reservation as of now; it fails by NotFound.
	Reservation(ctx context.Context, id string) (Reservation, error)
	// Stats counts the reservations of an event as the messages tell; it fails by NotFound.
	Stats(ctx context.Context, eventID string) (Stats, error)
}
