package memory

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/txretry"
)

// Store is what tables would hold. It has no lock of its own: all access, reading
// too, is inside a transaction of one txretrytest.Manager, and those run one at a time.
type Store struct {
	tx           txretry.Transactor
	flow         *flow.Tracker
	learned      func(id uuid.UUID, status string) // optional
	events       map[string]*event
	reservations map[string]booking.Reservation
	heard        map[string]heard
}

type event struct {
	booking.Event
	seats []booking.Seat
}

// heard is the last that the consumer learned of a reservation.
type heard struct {
	eventID string
	status  booking.Status
}

// newStore returns an empty store that is used within transactions of tx.
func newStore(tx txretry.Transactor, cfg Config) *Store {
	return &Store{
		tx:           tx,
		flow:         cfg.Flow,
		learned:      cfg.Observe.Learned,
		events:       map[string]*event{},
		reservations: map[string]booking.Reservation{},
		heard:        map[string]heard{},
	}
}

var _ booking.Reader = (*Store)(nil)

// Events implements booking.Reader.
func (s *Store) Events(ctx context.Context, after string, limit int) ([]booking.Event, error) {
	var found []booking.Event
	err := s.read(ctx, func() error {
		found = nil
		for id, e := range s.events {
			if id > after {
				found = append(found, e.Event)
			}
		}
		slices.SortFunc(found, func(a, b booking.Event) int { return strings.Compare(a.ID, b.ID) })
		found = found[:min(limit, len(found))]
		return nil
	})
	return found, err
}

// EventMap implements booking.Reader.
func (s *Store) EventMap(ctx context.Context, id string) (booking.EventMap, error) {
	var m booking.EventMap
	err := s.read(ctx, func() error {
		e, ok := s.events[id]
		if !ok {
			return booking.NotFound("event")
		}
		m = booking.EventMap{Event: e.Event, Map: slices.Clone(e.seats)}
		for i, seat := range m.Map {
			m.Map[i].State = seat.StateAt(clock())
		}
		return nil
	})
	return m, err
}

// Reservation implements booking.Reader.
func (s *Store) Reservation(ctx context.Context, id string) (booking.Reservation, error) {
	var r booking.Reservation
	err := s.read(ctx, func() error {
		var ok bool
		if r, ok = s.reservations[id]; !ok {
			return booking.NotFound("reservation")
		}
		r.Status = r.StatusAt(clock())
		return nil
	})
	return r, err
}

// Stats implements booking.Reader.
func (s *Store) Stats(ctx context.Context, eventID string) (booking.Stats, error) {
	var counts map[booking.Status]int
	err := s.read(ctx, func() error {
		if s.events[eventID] == nil {
			return booking.NotFound("event")
		}
		counts = map[booking.Status]int{}
		for _, h := range s.heard {
			if h.eventID == eventID {
				counts[h.status]++
			}
		}
		return nil
	})
	return booking.Stats{
		Held:      counts[booking.StatusHeld],
		Confirmed: counts[booking.StatusConfirmed],
		Cancelled: counts[booking.StatusCancelled],
		Expired:   counts[booking.StatusExpired],
	}, err
}

func (s *Store) read(ctx context.Context, fn func() error) error {
	return s.tx.DoWith(ctx, txretry.Options{Name: "shop.read", ReadOnly: true},
		func(context.Context, pgx.Tx) error { return fn() })
}

// clock is the time to the precision of a database.
func clock() time.Time { return time.Now().UTC().Truncate(time.Microsecond) }
