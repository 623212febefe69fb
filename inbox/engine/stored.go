package engine

import (
	"context"
	"errors"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// storedDelivery is a message of a parked key whose turn has come. Its acknowledgement deletes it.
type storedDelivery struct {
	key     string
	message *inbox.Message
	session *session
}

// Message implements driver.Delivery.
func (d *storedDelivery) Message() *inbox.Message { return d.message }

// parkingSession settles what a Parking has stored there, and the rest on the session itself.
type parkingSession struct {
	driver.Session
	parking driver.Parking
	owner   uuid.UUID
}

// Ack implements driver.Session.
func (s parkingSession) Ack(ctx context.Context, ds []driver.Delivery, mayWait bool) error {
	own, stored := split(ds)
	var errs []error
	if len(own) > 0 {
		errs = append(errs, s.Session.Ack(ctx, own, mayWait))
	}
	for _, d := range stored {
		errs = append(errs, s.parking.Done(ctx, s.owner, d.message))
	}
	return errors.Join(errs...)
}

// GiveBack implements driver.Session. What is stored stays where it is.
func (s parkingSession) GiveBack(ctx context.Context, ds []driver.Delivery) error {
	own, _ := split(ds)
	if len(own) == 0 {
		return nil
	}
	return s.Session.GiveBack(ctx, own)
}

func split(ds []driver.Delivery) (own []driver.Delivery, stored []*storedDelivery) {
	for _, d := range ds {
		if s, ok := d.(*storedDelivery); ok {
			stored = append(stored, s)
		} else {
			own = append(own, d)
		}
	}
	return own, stored
}
