// Package booking is the domain of the ticket shop: events with numbered seats,
// and reservations that hold seats for a while. It imports only the standard
// library, and reaches everything else through the ports in ports.go.
//
// A reservation starts as held and ends as confirmed, cancelled or expired. A
// held reservation counts as expired from its deadline on, even if nothing has
// written that yet: it cannot be confirmed, and its seats are open to the next
// buyer, whose hold expires it in the same transaction.
//
// # Lock order
//
// A seat is given away once because every use case takes its locks in the same
// order: reservations first, by id, then seats, by number. A hold locks only free
// seats. A use case that frees or confirms a seat holds the lock of the seat's
// reservation. So use cases never wait for each other in a circle.
package booking

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

const maxNameLength = 200

// Event is an event with seats.
type Event struct {
	ID    string
	Name  string
	Seats int
}

// EventMap is an event with all its seats, by number.
type EventMap struct {
	Event
	Map []Seat
}

// CreateEvent is the command to create an event.
type CreateEvent struct {
	Name  string
	Seats int
}

// Run checks the command and adds the event with all its seats free.
func (c CreateEvent) Run(ctx context.Context, s Shop, w Work) (Event, error) {
	if err := c.check(); err != nil {
		return Event{}, err
	}
	e := Event{ID: s.NewID(), Name: c.Name, Seats: c.Seats}
	return e, w.AddEvent(ctx, e)
}

func (c CreateEvent) check() error {
	if strings.TrimSpace(c.Name) == "" {
		return invalid("name is required")
	}
	if !utf8.ValidString(c.Name) || strings.ContainsFunc(c.Name, unicode.IsControl) {
		return invalid("name must be text without control characters")
	}
	if utf8.RuneCountInString(c.Name) > maxNameLength {
		return invalid(fmt.Sprintf("name is longer than %d characters", maxNameLength))
	}
	if c.Seats < 1 || c.Seats > MaxSeats {
		return invalid(fmt.Sprintf("seats must be from 1 to %d", MaxSeats))
	}
	return nil
}

// Status is the status of a reservation.
type Status string

// The statuses: held, then one of the other three, which are final.
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
	// Seats are the numbers of the seats, ascending. They stay after the reservation has lost the seats.
	Seats     []int
	Status    Status
	ExpiresAt time.Time
}

// StatusAt returns the status at a moment: a hold is expired from its deadline on.
func (r Reservation) StatusAt(now time.Time) Status {
	if r.Status == StatusHeld && !r.ExpiresAt.After(now) {
		return StatusExpired
	}
	return r.Status
}

// settle returns an error unless user may end the hold at this moment.
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

// MaxSeats is the largest number of seats of one event.
const MaxSeats = 10_000

const seatsPerRow = 10

// SeatState is the state of a seat on the map of an event.
type SeatState string

// The states of a seat.
const (
	SeatFree      SeatState = "free"
	SeatHeld      SeatState = "held"
	SeatConfirmed SeatState = "confirmed"
)

// Seat is one seat of an event.
type Seat struct {
	// Number counts from 1; SeatName gives its name.
	Number int
	State  SeatState
	// ReservationID and HeldUntil belong to the reservation that has the seat; empty for a free one.
	ReservationID string
	HeldUntil     time.Time
}

// StateAt returns the state at a moment: a seat whose hold is overdue is free.
func (s Seat) StateAt(now time.Time) SeatState {
	if s.State == SeatHeld && !s.HeldUntil.After(now) {
		return SeatFree
	}
	return s.State
}

// SeatName returns the name of a seat: A1 to A10, B1 to B10, … Z10, AA1 and so on.
func SeatName(number int) string {
	row, place := (number-1)/seatsPerRow, (number-1)%seatsPerRow+1
	letters := ""
	for row++; row > 0; row = (row - 1) / 26 {
		letters = string(rune('A'+(row-1)%26)) + letters
	}
	return letters + strconv.Itoa(place)
}

// SeatNumber is the inverse of SeatName. It returns false for a name that no event can have.
func SeatNumber(name string) (int, bool) {
	if len(name) > len("ABC10") {
		return 0, false
	}
	row, i := 0, 0
	for ; i < len(name) && name[i] >= 'A' && name[i] <= 'Z'; i++ {
		row = row*26 + int(name[i]-'A') + 1
	}
	place, err := strconv.Atoi(name[i:])
	if err != nil || row == 0 || place < 1 || place > seatsPerRow {
		return 0, false
	}
	number := (row-1)*seatsPerRow + place
	// Comparing with the canonical name rejects A01 and A+1.
	return number, number <= MaxSeats && SeatName(number) == name
}

// SeatNames returns the names of several seats.
func SeatNames(numbers []int) []string {
	names := make([]string, len(numbers))
	for i, n := range numbers {
		names[i] = SeatName(n)
	}
	return names
}

// The messages about reservations.
const (
	MessageHeld      = "reservation.held"
	MessageConfirmed = "reservation.confirmed"
	MessageCancelled = "reservation.cancelled"
	MessageExpired   = "reservation.expired"
)

// MessageOf returns the name of the message about a status.
func MessageOf(s Status) string { return "reservation." + string(s) }

// Stats counts the reservations of an event by their status.
type Stats struct {
	Held      int `json:"held"`
	Confirmed int `json:"confirmed"`
	Cancelled int `json:"cancelled"`
	Expired   int `json:"expired"`
}

// Rank orders the messages about one reservation: a held that arrives after
// a final status is outdated. There is only one final status per reservation.
func (s Status) Rank() int {
	if s == StatusHeld {
		return 1
	}
	return 2
}

// Code is the reason why a command was rejected. Clients see it.
type Code string

// The rejections of the domain.
const (
	CodeInvalidRequest     Code = "INVALID_REQUEST"
	CodeNotFound           Code = "NOT_FOUND"
	CodeNotYours           Code = "NOT_YOUR_RESERVATION"
	CodeSeatsUnavailable   Code = "SEATS_UNAVAILABLE"
	CodeReservationNotHeld Code = "RESERVATION_NOT_HELD"
	CodeReservationExpired Code = "RESERVATION_EXPIRED"
)

// Error is a rejection: an answer to the client, not a fault of the shop.
// A use case that returns an Error has changed nothing.
type Error struct {
	Code   Code
	Detail string
}

// Error returns the code and the detail.
func (e *Error) Error() string { return "booking: " + string(e.Code) + ": " + e.Detail }

// NotFound is the rejection of an unknown id.
func NotFound(what string) error { return &Error{CodeNotFound, "no such " + what} }

func invalid(detail string) error { return &Error{CodeInvalidRequest, detail} }
