package messages

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"go.opentelemetry.io/otel"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
)

const scope = "github.com/holdfast-go/holdfast/examples/reservation"

// Learn takes in, as part of a transaction, what a message says of a reservation.
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
					return inbox.Invalid(err) // no retry makes it better
				}
				ctx, span := otel.Tracer(scope).Start(ctx, "read model")
				defer span.End()
				return learn(ctx, tx, status, r)
			}))
	}
	return errors.Join(errs...)
}
