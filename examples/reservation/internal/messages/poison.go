package messages

import (
	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/outbox"
)

// Poison is a message that no attempt can process: it tells of a reservation that cannot be.
func Poison() outbox.Message {
	return outbox.Message{Name: booking.MessageHeld, Body: []byte(`{"reservation_id":"poison"}`)}
}
