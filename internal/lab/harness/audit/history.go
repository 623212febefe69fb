// Package audit compares what the clients of a ticket shop were told with what its database says happened.
package audit

import "github.com/google/uuid"

// What a client asks for, the Op of an Answer.
const (
	OpEvent   = "event"
	OpHold    = "hold"
	OpConfirm = "confirm"
	OpCancel  = "cancel"
	OpRead    = "read"
)

// The statuses of a reservation.
const (
	Held      = "held"
	Confirmed = "confirmed"
	Cancelled = "cancelled"
	Expired   = "expired"
)

// Answer is what a client was told.
type Answer struct {
	// Client gets its answers one after the other, but for those to requests that it sends twice at once.
	Client int
	Op     string
	// Key is the idempotency key, "" for a read. The key of a hold or an event is used by one user alone, and is its name.
	Key string
	// Event and Reservation are those that the request named; for what it made, those of the answer.
	Event       string
	Reservation string
	// Status is that of HTTP, 0 where no answer came; Code is that of a problem.
	Status int
	Code   string
	Body   string
	// State and Seats are the reservation's, as told.
	State string
	Seats []int
}

// What a Change is about.
const (
	OfEvent       = "event"       // it was made
	OfReservation = "reservation" // it was made, or its status changed
	OfSeat        = "seat"        // its state changed
	OfMessage     = "message"     // one was written into the outbox
	OfTaken       = "taken"       // one was entered into the inbox
	OfEffect      = "effect"      // the read model changed
)

// Change is a committed change, which a trigger has noted in its transaction.
type Change struct {
	Token uuid.UUID
	// ID ascends within what is locked by whoever changes it: a seat, a reservation.
	ID                 int64
	What               string
	Event, Reservation string
	Seat               int
	Seats              []int
	Status             string // of the reservation or the seat; of a message, its name
	User               string
	Message            uuid.UUID
}

// Reservation is a row of the shop, with what its read model knows.
type Reservation struct {
	ID, Event, User, Status string
	Seats                   []int
	Known                   string // "" where the read model has no row
	Messages                int
}

// Seat is a row of a seat that is not free.
type Seat struct {
	Event, State, Reservation string
	Number                    int
}

// Left counts what should be gone when nothing is under way any more.
type Left struct {
	Outbox, DeadOutbox, Parked, DeadInbox int
	// Due are holds that should have expired.
	Due int
}

// History is everything that is known when nothing is under way any more.
type History struct {
	Answers      []Answer
	Changes      []Change // ascending by ID
	Reservations []Reservation
	Events       []string
	Seats        []Seat
	Left         Left
	// Lost are changes that committed and that a failover to an asynchronous standby has lost. What they
	// explain is excused, and counted.
	Lost []Change
	// Limit is what the user who asks for too much was told.
	Limit Limit
	// ClockWentBack says that the clock of Postgres did so at some time.
	ClockWentBack bool
}
