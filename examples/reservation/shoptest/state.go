package shoptest

import (
	"time"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/memory"
)

// State is what the shop has stored at one moment.
type State struct {
	Reservations map[string]Reservation // by id
	Seats        []Seat                 // of all events
	Outbox       int                    // messages that are not published
	Queue        int                    // messages that are published and not settled
	Dead         int                    // dead letters, in the outbox and of the consumers
	Claims       int                    // idempotency keys in use
}

// Reservation is a reservation as it is stored.
type Reservation struct {
	User      string
	EventID   string
	Status    string // held, confirmed, cancelled or expired
	Learned   string // the status in the read model; empty: it has not heard of it
	ExpiresAt time.Time
	Seats     []string
}

// Seat is a seat as it is stored.
type Seat struct {
	EventID, Name string
	State         string // free, held or confirmed
	Reservation   string // empty: free
}

func (s *State) fill(rows memory.Rows) {
	s.Reservations = make(map[string]Reservation, len(rows.Reservations))
	for _, r := range rows.Reservations {
		s.Reservations[r.ID] = Reservation{
			User: r.User, EventID: r.EventID, Status: string(r.Status), Learned: string(rows.Heard[r.ID]), ExpiresAt: r.ExpiresAt,
			Seats: booking.SeatNames(r.Seats),
		}
	}
	for _, e := range rows.Events {
		for _, seat := range e.Map {
			s.Seats = append(s.Seats, Seat{e.ID, booking.SeatName(seat.Number), string(seat.State), seat.ReservationID})
		}
	}
}
