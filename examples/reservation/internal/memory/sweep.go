package memory

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirytest"
)

// addHolds shows the held reservations to a sweeper.
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
