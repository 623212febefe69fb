// Package messages is the wire form of what the shop tells the world: the JSON
// body of the four reservation messages, and their ids.
package messages

import (
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/outbox"
)

// Where the messages go on a broker: to a topic exchange by their name, and
// from there to the queue of the read model's consumer.
const (
	Exchange = "reservation"
	Queue    = "reservation.stats"
	Binding  = "reservation.*"
)

// Reservation is the body of every message: the reservation as the change left
// it. The name of the message says what the change was.
type Reservation struct {
	ReservationID string    `json:"reservation_id"`
	EventID       string    `json:"event_id"`
	User          string    `json:"user"`
	Seats         []string  `json:"seats"`
	ExpiresAt     time.Time `json:"expires_at"`
}

// check finds ids that the shop cannot have given.
func (r Reservation) check() error {
	_, err1 := uuid.Parse(r.ReservationID)
	_, err2 := uuid.Parse(r.EventID)
	if err := errors.Join(err1, err2); err != nil {
		return fmt.Errorf("messages: reservation or event: %w", err)
	}
	return nil
}

// New announces the status of a reservation. Its messages are ordered among
// themselves. The id of an expiry follows from the reservation, so whoever
// expires it, the sweeper or a buyer, sends the same message.
func New(r booking.Reservation) (outbox.Message, error) {
	m, err := outbox.NewMessage(booking.MessageOf(r.Status), Reservation{
		ReservationID: r.ID, EventID: r.EventID, User: r.User,
		Seats: booking.SeatNames(r.Seats), ExpiresAt: r.ExpiresAt.UTC(),
	})
	if err != nil {
		return outbox.Message{}, err
	}
	m.Key = r.ID
	if r.Status == booking.StatusExpired {
		m.ID = expiry.EventID(m.Name, r.ID, r.ExpiresAt)
	}
	return m, nil
}
