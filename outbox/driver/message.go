package driver

import (
	"time"

	"github.com/google/uuid"
)

// Message is a stored message, as a store gives it to a relay and a relay to a Publisher. Body and
// the maps are read only.
type Message struct {
	// ID is a UUID v7 and unique in the store.
	ID          uuid.UUID
	Name        string
	Body        []byte
	ContentType string
	// Headers travel beside the body. They include the trace context of the writer.
	Headers map[string]string
	// Key is the ordering key. Empty means no order.
	Key string
	// Transport names the relay's publisher for this message. Empty means the default one.
	Transport string
	// Exchange, RoutingKey and RouteHeaders are the message's own route. What is empty is left to the
	// Publisher.
	Exchange, RoutingKey string
	RouteHeaders         map[string]string
	// NotBefore is the earliest time to publish. It is for the writer; a message that was claimed no
	// longer has it.
	NotBefore time.Time
	// CreatedAt is when the message was stored, by the store's clock. A writer leaves it zero.
	CreatedAt time.Time
	// Attempts counts the failed attempts to publish so far.
	Attempts int
}
