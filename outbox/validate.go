package outbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/telemetry"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// defaultMaxBody is the default limit of a message body in bytes: 1 MiB.
const defaultMaxBody = 1 << 20

// The other limits of a message. They fit AMQP's short strings and header frame.
const (
	maxKey         = 255
	maxTransport   = 64
	maxContentType = 127
	maxExchange    = 127
	maxRoutingKey  = 255
	maxHeaders     = 64
	maxHeaderName  = 128
	maxHeaderBytes = 16 << 10 // names and values of one map together
)

// MessageError names the field of a message that was rejected, and the reason. A writer returns one per problem,
// joined.
type MessageError struct {
	Index   int    // position of the message in the call, from 0
	Field   string // as in Message, such as "Body" or "Route.Headers"; or "DedupKey"
	Problem string
}

// Error implements error.
func (e *MessageError) Error() string {
	return fmt.Sprintf("outbox: message %d: %s %s", e.Index, e.Field, e.Problem)
}

// Prepare checks messages and completes them for storing; every writer calls it. It returns them with id and content
// type set and the trace context of ctx in their headers. If any field of any message is invalid, it returns one
// *MessageError for each, joined. maxBodyBytes 0 means 1 MiB.
func Prepare(ctx context.Context, msgs []Message, maxBodyBytes int) ([]driver.Message, error) {
	if maxBodyBytes <= 0 {
		maxBodyBytes = defaultMaxBody
	}
	var errs []error
	seen := make(map[uuid.UUID]bool, len(msgs))
	prepared := make([]driver.Message, len(msgs))
	for i, m := range msgs {
		if m.ID == uuid.Nil {
			m.ID = ids.New()
		}
		if m.ContentType == "" {
			m.ContentType = contentTypeJSON
		}
		report := func(field, format string, args ...any) {
			errs = append(errs, &MessageError{Index: i, Field: field, Problem: fmt.Sprintf(format, args...)})
		}
		if seen[m.ID] {
			report("ID", "%s is already used by an earlier message of the call", m.ID)
		}
		seen[m.ID] = true
		m.validate(maxBodyBytes, report)
		prepared[i] = driver.Message{
			ID: m.ID, Name: m.Name, Body: m.Body, ContentType: m.ContentType, Headers: m.Headers,
			Key: m.Key, Transport: m.Transport, NotBefore: m.NotBefore,
			Exchange: m.Route.Exchange, RoutingKey: m.Route.RoutingKey, RouteHeaders: m.Route.Headers,
		}
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	for i := range prepared {
		m := &prepared[i]
		m.Headers = telemetry.Inject(create(ctx, m), m.Headers)
	}
	return prepared, nil
}

func (m Message) validate(maxBodyBytes int, report func(field, format string, args ...any)) {
	if err := ids.Check(m.ID); err != nil {
		report("ID", "is invalid: %v", err)
	}
	if err := driver.CheckName(m.Name); err != nil {
		report("Name", "%v", err)
	}
	if len(m.Body) > maxBodyBytes {
		report("Body", "has %d bytes, at most %d are allowed", len(m.Body), maxBodyBytes)
	} else if isJSON(m.ContentType) && (!utf8.Valid(m.Body) || !json.Valid(m.Body)) {
		report("Body", "is not valid JSON, which content type %q requires", m.ContentType)
	}
	if len(m.ContentType) > maxContentType || !isMediaType(m.ContentType) {
		report("ContentType", "is not a media type of at most %d bytes", maxContentType)
	}
	checkText("Key", m.Key, maxKey, report)
	if len(m.Transport) > maxTransport || !printableASCII(m.Transport) {
		report("Transport", "wants at most %d printable ASCII characters", maxTransport)
	}
	checkText("Route.Exchange", m.Route.Exchange, maxExchange, report)
	checkText("Route.RoutingKey", m.Route.RoutingKey, maxRoutingKey, report)
	if year := m.NotBefore.Year(); year < 1 || year > 9999 {
		report("NotBefore", "is in the year %d, 1 to 9999 are allowed", year)
	}
	checkHeaders("Headers", m.Headers, report)
	checkHeaders("Route.Headers", m.Route.Headers, report)
}

// isMediaType also requires a slash, which mime.ParseMediaType does not.
func isMediaType(s string) bool {
	media, _, err := mime.ParseMediaType(s)
	return err == nil && strings.Contains(media, "/") && printableASCII(s)
}

func isJSON(contentType string) bool {
	media, _, err := mime.ParseMediaType(contentType)
	return err == nil && (media == contentTypeJSON || strings.HasSuffix(media, "+json"))
}

func checkText(field, s string, limit int, report func(field, format string, args ...any)) {
	if len(s) > limit || !plainText(s) {
		report(field, "wants at most %d bytes of UTF-8 without control characters", limit)
	}
}

func checkHeaders(field string, headers map[string]string, report func(field, format string, args ...any)) {
	if len(headers) > maxHeaders {
		report(field, "has %d entries, at most %d are allowed", len(headers), maxHeaders)
		return
	}
	total := 0
	for name, value := range headers {
		total += len(name) + len(value)
		switch {
		case name == "" || len(name) > maxHeaderName || !printableASCII(name) || strings.Contains(name, " "):
			report(field, "has a name that is not 1 to %d printable ASCII characters", maxHeaderName)
		case driver.Reserved(name):
			report(field, "has the name %q, which is reserved", name)
		case !plainText(value):
			report(field, "has a value for %q that is not UTF-8 without control characters", name)
		}
	}
	if total > maxHeaderBytes {
		report(field, "has %d bytes, at most %d are allowed", total, maxHeaderBytes)
	}
}

func printableASCII(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}

func plainText(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, unicode.IsControl)
}
