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

// Message is a stored message, as a store returns it to a relay and a relay passes it to a
// Publisher. Body and the maps are read-only.
type Message struct {
	// ID is a UUID v7, unique in the store.
	ID          uuid.UUID
	Name        string
	Body        []byte
	ContentType string
	// Headers are sent with the body. They include the writer's trace context.
	Headers map[string]string
	// Key is the ordering key. Empty means no order.
	Key string
	// Transport names the relay's publisher for this message. Empty means the default publisher.
	Transport string
	// Exchange, RoutingKey and RouteHeaders are the message's own route. For an empty field, the
	// Publisher chooses.
	Exchange, RoutingKey string
	RouteHeaders         map[string]string
	// NotBefore is the earliest time to publish. Only writers use it; claimed messages do not have it.
	NotBefore time.Time
	// CreatedAt is the time when the message was stored, by the store's clock. Writers leave it zero.
	CreatedAt time.Time
	// Attempts counts the failed attempts to publish so far.
	Attempts int
}

// Known is what a store knows of one message that is not a dead letter.
type Known struct {
	Message
	// DueAt is when its next attempt is due. Zero: it is ready, or waits for the previous message of its key.
	DueAt time.Time
	// PublishedAt is when it was published. Zero: it is not.
	PublishedAt time.Time
	// Class and Error describe the last failed attempt.
	Class Class
	Error string
}

const (
	maxName     = 128
	maxDedupKey = 255
)

// CheckName returns an error unless name is at most 128 bytes of lower-case words, joined by dots.
// A word consists of letters, digits, "_" and "-", and starts with a letter or digit.
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

// CheckDedupKey returns an error unless key is 1 to 255 bytes of UTF-8 without control characters.
func CheckDedupKey(key string) error {
	if key == "" || len(key) > maxDedupKey || !utf8.ValidString(key) || strings.ContainsFunc(key, unicode.IsControl) {
		return fmt.Errorf("wants 1 to %d bytes of UTF-8 without control characters", maxDedupKey)
	}
	return nil
}

// Reserved reports whether a header name belongs to the transports or to Holdfast. Messages may not
// carry reserved headers: "type", "CC" and "BCC" (RabbitMQ routes by them), every name with the prefix
// "holdfast-", and the headers that RabbitMQ writes, such as "x-death" and "x-delivery-count". Case does not matter.
func Reserved(name string) bool {
	name = strings.ToLower(name)
	switch name {
	case "type", "cc", "bcc":
		return true
	}
	return strings.HasPrefix(name, "holdfast-") || wire.OfBroker(name)
}
