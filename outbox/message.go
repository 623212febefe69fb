package outbox

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/ids"
)

// contentTypeJSON is the content type of a message that names none.
const contentTypeJSON = "application/json"

// Message is one message on its way from a business transaction to a broker.
// Body and Headers are not copied: leave them alone once the message is written.
type Message struct {
	// ID is a UUID v7. The zero UUID lets the writer make one.
	ID uuid.UUID
	// Name says what happened, such as "order.placed": lower-case words of letters, digits,
	// "_" and "-", joined by dots, at most 128 bytes. Brokers carry it as the message type.
	Name string
	// Body holds business data only. It must be valid JSON unless ContentType says something else.
	Body []byte
	// ContentType is a media type. Default: application/json.
	ContentType string
	// Headers travel beside the body. The trace context of the writing context is added to them.
	Headers map[string]string
	// Key is the ordering key: messages with the same key are published in the order in which
	// they were stored. Empty means no order. At most 255 bytes of UTF-8.
	Key string
	// Transport names the relay's publisher for this message. Empty means the default one.
	Transport string
	// Route is where the message goes, unless the Config of its publisher says something else.
	// Optional.
	Route Route
	// NotBefore is the earliest time to publish, by the store's clock. Zero, and a time in the past,
	// mean at once. Later messages of the same Key wait with it, earlier ones do not. A relay that
	// takes the message no longer sees it.
	NotBefore time.Time
}

// Route is where a message goes on a broker that routes. Empty fields leave the choice to the
// publisher: its Config says how.
type Route struct {
	// Exchange is the exchange, or whatever the transport calls its destination; at most 127 bytes.
	Exchange string
	// RoutingKey is at most 255 bytes.
	RoutingKey string
	// Headers are added to the message's own and win over them.
	Headers map[string]string
}

// NewMessage makes a message with a fresh id and v encoded as JSON. Everything else
// is checked where the message is written.
func NewMessage(name string, v any) (Message, error) {
	body, err := json.Marshal(v)
	if err != nil {
		return Message{}, fmt.Errorf("outbox: encode %s: %w", name, err)
	}
	return Message{ID: ids.New(), Name: name, Body: body, ContentType: contentTypeJSON}, nil
}
