// Package messages is the wire form of the shop's messages: the JSON body of the
// four messages about reservations, and their ids.
package messages

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"go.opentelemetry.io/otel"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/outbox"
)

// The route of the messages on a broker: to a topic exchange by their name, and
// from there to the queue of the read model's consumer.
const (
	Exchange = "reservation"
	Queue    = "reservation.stats"
	Binding  = "reservation.*"
)

// Durable is the consumer on NATS, where names have no dots. Its stream is Exchange.
const Durable = "reservation-stats"

// Reservation is the body of every message: the reservation after the change.
// The name of the message names the change.
type Reservation struct {
	ReservationID string    `json:"reservation_id"`
	EventID       string    `json:"event_id"`
	User          string    `json:"user"`
	Seats         []string  `json:"seats"`
	ExpiresAt     time.Time `json:"expires_at"`
}

// check rejects ids that the shop cannot have made.
func (r Reservation) check() error {
	_, err1 := uuid.Parse(r.ReservationID)
	_, err2 := uuid.Parse(r.EventID)
	if err := errors.Join(err1, err2); err != nil {
		return fmt.Errorf("messages: reservation or event: %w", err)
	}
	return nil
}

// New returns the message about the status of a reservation. The messages of one
// reservation stay in order. The id of an expiry depends on the reservation, so the
// sweeper and a buyer that expire it send the same message.
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

const scope = "github.com/holdfast-go/holdfast/examples/reservation"

// Learn processes a message about a reservation in a transaction.
type Learn func(ctx context.Context, tx pgx.Tx, status booking.Status, r Reservation) error

// Listen registers learn for all messages of the shop.
func Listen(p *inboxpgx.Store, learn Learn) error {
	var errs []error
	for _, status := range []booking.Status{
		booking.StatusHeld, booking.StatusConfirmed, booking.StatusCancelled, booking.StatusExpired,
	} {
		errs = append(errs, inboxpgx.Handle(p, booking.MessageOf(status),
			func(ctx context.Context, tx pgx.Tx, r Reservation) error {
				if err := r.check(); err != nil {
					return inbox.Invalid(err) // no retry helps
				}
				ctx, span := otel.Tracer(scope).Start(ctx, "read model")
				defer span.End()
				return learn(ctx, tx, status, r)
			}))
	}
	return errors.Join(errs...)
}

// Poison returns a message that no attempt can process: its reservation cannot exist.
func Poison() outbox.Message {
	return outbox.Message{Name: booking.MessageHeld, Body: []byte(`{"reservation_id":"poison"}`)}
}
