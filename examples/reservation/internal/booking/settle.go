package booking

import (
	"context"
	"slices"
)

// Confirm is the wish of a user to keep the seats.
type Confirm struct{ User, ReservationID string }

// Run confirms the reservation if it is the user's and still held.
func (c Confirm) Run(ctx context.Context, w Work) (Reservation, error) {
	return settle(ctx, w, c.ReservationID, c.User, StatusConfirmed)
}

// Cancel is the wish of a user to give the seats back.
type Cancel struct{ User, ReservationID string }

// Run cancels the reservation if it is the user's and still held.
func (c Cancel) Run(ctx context.Context, w Work) (Reservation, error) {
	return settle(ctx, w, c.ReservationID, c.User, StatusCancelled)
}

func settle(ctx context.Context, w Work, id, user string, to Status) (Reservation, error) {
	r, err := w.LockReservation(ctx, id)
	if err != nil {
		return Reservation{}, err
	}
	now, err := w.Now(ctx)
	if err != nil {
		return Reservation{}, err
	}
	if err := r.settle(user, now); err != nil {
		return Reservation{}, err
	}
	r.Status = to
	return r, w.Settle(ctx, r)
}

// expire ends reservations whose deadline has passed. One that the sweeper got to first is left alone.
func expire(ctx context.Context, w Work, ids []string) error {
	slices.Sort(ids)
	for _, id := range slices.Compact(ids) {
		r, err := w.LockReservation(ctx, id)
		if err != nil {
			return err
		}
		if r.Status != StatusHeld {
			continue
		}
		r.Status = StatusExpired
		if err := w.Settle(ctx, r); err != nil {
			return err
		}
	}
	return nil
}
