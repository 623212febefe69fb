package booking

import (
	"context"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

const maxNameLength = 200

// Event is something one can have a seat at.
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

// CreateEvent is the wish for a new event.
type CreateEvent struct {
	Name  string
	Seats int
}

// Run checks the wish and adds the event with all its seats free.
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
