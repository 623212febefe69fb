package memory

import (
	"context"
	"slices"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
)

// Rows are all that the tables would hold.
type Rows struct {
	Events       []booking.EventMap // with the seats as they are stored
	Reservations []booking.Reservation
	Heard        map[string]booking.Status // the read model, by reservation
}

// Dump returns all rows, in no order.
func (s *Store) Dump(ctx context.Context) (rows Rows, err error) {
	err = s.read(ctx, func() error {
		rows = Rows{Heard: make(map[string]booking.Status, len(s.heard))}
		for _, e := range s.events {
			rows.Events = append(rows.Events, booking.EventMap{Event: e.Event, Map: slices.Clone(e.seats)})
		}
		for _, r := range s.reservations {
			rows.Reservations = append(rows.Reservations, r)
		}
		for id, h := range s.heard {
			rows.Heard[id] = h.status
		}
		return nil
	})
	return rows, err
}
