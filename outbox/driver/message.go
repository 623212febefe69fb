package driver

import (
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/wire"
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

const (
	maxName     = 128
	maxDedupKey = 255
)

// CheckName refuses a name that is not lower-case words of letters, digits, "_" and "-", each
// beginning with a letter or digit, joined by dots, of at most 128 bytes.
func CheckName(name string) error {
	if name == "" || len(name) > maxName {
		return fmt.Errorf("has %d bytes, 1 to %d are allowed", len(name), maxName)
	}
	first := true
	for i := range len(name) {
		switch c := name[i]; {
		case c >= 'a' && c <= 'z', c >= '0' && c <= '9':
			first = false
		case (c == '_' || c == '-') && !first:
		case c == '.' && !first:
			first = true
		default:
			return fmt.Errorf("%q is not lower-case words joined by dots", name)
		}
	}
	if first {
		return fmt.Errorf("%q ends with a dot", name)
	}
	return nil
}

// CheckDedupKey refuses a key for writing once that is not 1 to 255 bytes of UTF-8 without control
// characters.
func CheckDedupKey(key string) error {
	if key == "" || len(key) > maxDedupKey || !utf8.ValidString(key) || strings.ContainsFunc(key, unicode.IsControl) {
		return fmt.Errorf("wants 1 to %d bytes of UTF-8 without control characters", maxDedupKey)
	}
	return nil
}

// Reserved reports whether a header name belongs to the transports or to Holdfast, so that a
// message may not carry it: "type", "CC" and "BCC" (RabbitMQ routes by them), everything that begins with
// "holdfast-", and the headers that RabbitMQ writes, such as "x-death" and "x-delivery-count". Case does not matter.
func Reserved(name string) bool {
	name = strings.ToLower(name)
	switch name {
	case "type", "cc", "bcc":
		return true
	}
	return strings.HasPrefix(name, "holdfast-") || wire.OfBroker(name)
}
