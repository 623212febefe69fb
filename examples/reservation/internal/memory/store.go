package memory

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/messages"
	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirytest"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// Store has the rows of all tables. It has no lock: all access, also reading, is
// inside a transaction of one txretrytest.Manager, and those run one at a time.
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

// heard is the last status of a reservation in the read model.
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

// clock returns the time with the precision of a database.
func clock() time.Time { return time.Now().UTC().Truncate(time.Microsecond) }

// Outbox stores messages in the transaction of their change; *outboxtest.Store implements it.
type Outbox interface {
	Write(ctx context.Context, tx pgx.Tx, msgs ...outbox.Message) error
}

// work is booking.Work on one fake transaction. It needs no locks, because no second transaction runs.
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

// write stores a reservation and its message.
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

// setSeat changes a seat of the reservation owner; "" for a free seat.
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

// learn updates the read model by a message. The higher rank wins, so the order of
// the messages does not matter.
func (s *Store) learn(ctx context.Context, tx pgx.Tx, status booking.Status, m messages.Reservation) error {
	if message, ok := inbox.FromContext(ctx); ok && s.learned != nil {
		if err := atCommit(tx, func() { s.learned(message.ID, string(status)) }); err != nil {
			return err
		}
	}
	if known, ok := s.heard[m.ReservationID]; ok && known.status.Rank() >= status.Rank() {
		return nil
	}
	txretry.AfterCommit(tx, func() { s.flow.Note(flow.Updated, string(status)) })
	return put(tx, s.heard, m.ReservationID, heard{m.EventID, status})
}

// addHolds makes the held reservations visible to a sweeper.
func (s *Shop) addHolds() (err error) {
	s.holds, err = expirytest.New(s.tx, expirytest.Config{
		Active: s.held,
		Expire: func(ctx context.Context, tx pgx.Tx, row expiry.Row) error {
			r := s.reservations[row.ID]
			r.Status = booking.StatusExpired
			return s.work(tx).Settle(ctx, r)
		},
	})
	return err
}

func (s *Store) held() []expiry.Row {
	var rows []expiry.Row
	for _, r := range s.reservations {
		if r.Status == booking.StatusHeld {
			rows = append(rows, expiry.Row{ID: r.ID, Deadline: r.ExpiresAt})
		}
	}
	return rows
}
