package httpapi

import (
	"context"
	"net/http"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
)

func (a *api) hold(w http.ResponseWriter, r *http.Request) {
	wish, err := readHold(r)
	if err != nil {
		a.fail(w, r, err)
		return
	}
	a.once(w, r, wish.EventID, http.StatusCreated, func(ctx context.Context, work booking.Work) (any, error) {
		reservation, err := wish.Run(ctx, a.shop, work)
		return viewReservation(reservation), err
	})
}

func readHold(r *http.Request) (booking.HoldSeats, error) {
	wish := booking.HoldSeats{User: userOf(r.Context())}
	body, err := readBody(r, "event_id", "seats", "quantity")
	if err != nil {
		return wish, err
	}
	if _, both := body["quantity"]; both && body["seats"] != nil {
		return wish, invalid("give seats or quantity, not both")
	}
	if err := body.into("event_id", &wish.EventID); err != nil {
		return wish, err
	}
	if err := body.into("seats", &wish.Seats); err != nil {
		return wish, err
	}
	if err := body.into("quantity", &wish.Quantity); err != nil {
		return wish, err
	}
	return wish, wish.Check()
}

func (a *api) confirm(w http.ResponseWriter, r *http.Request) {
	wish := booking.Confirm{User: userOf(r.Context()), ReservationID: r.PathValue("id")}
	a.settle(w, r, wish.Run)
}

func (a *api) cancel(w http.ResponseWriter, r *http.Request) {
	wish := booking.Cancel{User: userOf(r.Context()), ReservationID: r.PathValue("id")}
	a.settle(w, r, wish.Run)
}

func (a *api) settle(w http.ResponseWriter, r *http.Request, run func(context.Context, booking.Work) (booking.Reservation, error)) {
	if _, err := readBody(r); err != nil {
		a.fail(w, r, err)
		return
	}
	// The event of a reservation never changes, so this look outside of the transaction is good enough to queue by.
	seen, err := a.backend.Reservation(r.Context(), r.PathValue("id"))
	if err != nil {
		a.fail(w, r, err)
		return
	}
	a.once(w, r, seen.EventID, http.StatusOK, func(ctx context.Context, work booking.Work) (any, error) {
		reservation, err := run(ctx, work)
		return viewReservation(reservation), err
	})
}

func (a *api) showReservation(w http.ResponseWriter, r *http.Request) {
	reservation, err := a.backend.Reservation(r.Context(), r.PathValue("id"))
	a.show(w, r, viewReservation(reservation), err)
}
