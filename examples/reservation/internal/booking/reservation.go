package booking

import "time"

// Status is where a reservation stands.
type Status string

// The states: held, then one of the other three for ever.
const (
	StatusHeld      Status = "held"
	StatusConfirmed Status = "confirmed"
	StatusCancelled Status = "cancelled"
	StatusExpired   Status = "expired"
)

// Reservation is a claim of one user on seats of one event.
type Reservation struct {
	ID      string
	EventID string
	User    string
	// Seats are the numbers of the seats, ascending. They stay after the reservation has lost them.
	Seats     []int
	Status    Status
	ExpiresAt time.Time
}

// StatusAt is the status at a moment: a hold is expired from its deadline on.
func (r Reservation) StatusAt(now time.Time) Status {
	if r.Status == StatusHeld && !r.ExpiresAt.After(now) {
		return StatusExpired
	}
	return r.Status
}

// settle checks that user may end the hold at this moment.
func (r Reservation) settle(user string, now time.Time) error {
	if r.User != user {
		return &Error{CodeNotYours, "the reservation belongs to another user"}
	}
	switch status := r.StatusAt(now); status {
	case StatusHeld:
		return nil
	case StatusExpired:
		return &Error{CodeReservationExpired, "the reservation expired at " + r.ExpiresAt.UTC().Format(time.RFC3339)}
	default:
		return &Error{CodeReservationNotHeld, "the reservation is " + string(status)}
	}
}
