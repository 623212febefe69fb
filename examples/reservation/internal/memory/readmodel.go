package memory

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/messages"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/txretry"
)

// learn writes into the read model what a message says of a reservation. The
// higher rank wins, so the order of the messages does not matter.
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
