package booking

import (
	"context"
	"fmt"
	"slices"
)

// HoldSeats is a user's command to hold seats: these seats, or a number of any seats.
type HoldSeats struct {
	User    string
	EventID string
	// Seats names the seats; Quantity counts them. Exactly one of the two is set.
	Seats    []string
	Quantity int
}

// Check checks the parts of the command that do not depend on the event.
func (h HoldSeats) Check() error {
	if h.EventID == "" {
		return invalid("event_id is required")
	}
	if h.Seats == nil {
		return h.checkQuantity()
	}
	if h.Quantity != 0 {
		return invalid("give seats or quantity, not both")
	}
	if len(h.Seats) == 0 || len(h.Seats) > MaxSeats {
		return invalid(fmt.Sprintf("seats must name 1 to %d seats", MaxSeats))
	}
	_, err := h.numbers(MaxSeats)
	return err
}

func (h HoldSeats) checkQuantity() error {
	if h.Quantity < 1 || h.Quantity > MaxSeats {
		return invalid(fmt.Sprintf("give seats, or a quantity from 1 to %d", MaxSeats))
	}
	return nil
}

// Run holds the seats, all or none.
func (h HoldSeats) Run(ctx context.Context, s Shop, w Work) (Reservation, error) {
	if err := h.Check(); err != nil {
		return Reservation{}, err
	}
	numbers, err := h.find(ctx, w)
	if err != nil {
		return Reservation{}, err
	}
	now, err := w.Now(ctx)
	if err != nil {
		return Reservation{}, err
	}
	r := Reservation{
		ID: s.NewID(), EventID: h.EventID, User: h.User,
		Seats: numbers, Status: StatusHeld, ExpiresAt: now.Add(s.Hold),
	}
	return r, w.AddReservation(ctx, r)
}

// find returns the numbers of seats that may be taken.
func (h HoldSeats) find(ctx context.Context, w Work) ([]int, error) {
	if h.Seats != nil {
		return h.findNamed(ctx, w)
	}
	event, err := w.Event(ctx, h.EventID)
	if err != nil {
		return nil, err
	}
	if h.Quantity > event.Seats {
		return nil, unavailable()
	}
	return findAny(ctx, w, event.ID, h.Quantity)
}

func (h HoldSeats) findNamed(ctx context.Context, w Work) ([]int, error) {
	numbers, err := h.numbers(MaxSeats)
	if err != nil {
		return nil, err
	}
	seats, err := w.Seats(ctx, h.EventID, numbers)
	if err != nil {
		return nil, err
	}
	if len(seats) < len(numbers) {
		return nil, h.missing(ctx, w)
	}
	return open(ctx, w, seats)
}

// missing returns an error for a seat that does not exist, or for an event that does not.
func (h HoldSeats) missing(ctx context.Context, w Work) error {
	event, err := w.Event(ctx, h.EventID)
	if err != nil {
		return err
	}
	if _, err = h.numbers(event.Seats); err == nil {
		err = fmt.Errorf("booking: event %s has %d seats, and not all of them", event.ID, event.Seats)
	}
	return err
}

func findAny(ctx context.Context, w Work, eventID string, n int) ([]int, error) {
	numbers, err := w.LockAnyFree(ctx, eventID, n)
	if err != nil || len(numbers) == n {
		return numbers, err
	}
	// Others have locked some seats, and may release them. Only a scan that skips no seat can report "sold out".
	seats, err := w.OpenSeats(ctx, eventID, n)
	if err != nil {
		return nil, err
	}
	if len(seats) < n {
		return nil, unavailable()
	}
	return open(ctx, w, seats)
}

// open returns the numbers of seats that are all free, after it has expired overdue reservations.
func open(ctx context.Context, w Work, seats []Seat) ([]int, error) {
	now, err := w.Now(ctx)
	if err != nil {
		return nil, err
	}
	var numbers []int
	var overdue []string
	for _, seat := range seats {
		if seat.StateAt(now) != SeatFree {
			return nil, unavailable()
		}
		numbers = append(numbers, seat.Number)
		if seat.State == SeatHeld {
			overdue = append(overdue, seat.ReservationID)
		}
	}
	return numbers, expire(ctx, w, overdue)
}

// numbers converts the names to ascending numbers.
func (h HoldSeats) numbers(seats int) ([]int, error) {
	numbers := make([]int, 0, len(h.Seats))
	for _, name := range h.Seats {
		n, ok := SeatNumber(name)
		if !ok || n > seats {
			return nil, invalid(fmt.Sprintf("the event has no seat %.20q", name))
		}
		numbers = append(numbers, n)
	}
	slices.Sort(numbers)
	if len(slices.Compact(slices.Clone(numbers))) < len(numbers) {
		return nil, invalid("a seat is named twice")
	}
	return numbers, nil
}

func unavailable() error {
	return &Error{CodeSeatsUnavailable, "not enough of these seats are free"}
}

// Confirm is a user's command to confirm a reservation.
type Confirm struct{ User, ReservationID string }

// Run confirms the reservation if it is the user's and still held.
func (c Confirm) Run(ctx context.Context, w Work) (Reservation, error) {
	return settle(ctx, w, c.ReservationID, c.User, StatusConfirmed)
}

// Cancel is a user's command to cancel a reservation.
type Cancel struct{ User, ReservationID string }

// Run cancels the reservation if it is the user's and still held.
func (c Cancel) Run(ctx context.Context, w Work) (Reservation, error) {
	return settle(ctx, w, c.ReservationID, c.User, StatusCancelled)
}

func settle(ctx context.Context, w Work, id, user string, to Status) (Reservation, error) {
	r, err := w.LockReservation(ctx, id)
	if err != nil {
		return Reservation{}, err
	}
	now, err := w.Now(ctx)
	if err != nil {
		return Reservation{}, err
	}
	if err := r.settle(user, now); err != nil {
		return Reservation{}, err
	}
	r.Status = to
	return r, w.Settle(ctx, r)
}

// expire ends reservations whose deadline has passed. It skips reservations that the sweeper has ended before.
func expire(ctx context.Context, w Work, ids []string) error {
	slices.Sort(ids)
	for _, id := range slices.Compact(ids) {
		r, err := w.LockReservation(ctx, id)
		if err != nil {
			return err
		}
		if r.Status != StatusHeld {
			continue
		}
		r.Status = StatusExpired
		if err := w.Settle(ctx, r); err != nil {
			return err
		}
	}
	return nil
}
