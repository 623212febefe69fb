package inboxredis

import (
	"cmp"
	"encoding/json"
	"strconv"
	"strings"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/inbox/record"
	"github.com/holdfast-go/holdfast/internal/wire"
)

// The fields of an entry in the form of package outboxredis.
const (
	fieldID          = "id"
	fieldName        = "name"
	fieldContentType = "content-type"
	fieldKey         = "key"
	fieldCreatedAt   = "created-at"
	fieldHeaders     = "headers"
	fieldBody        = "body"

	// Those of other senders, which outboxredis does not write.
	fieldContentEncoding = "content-encoding"
	fieldCorrelationID   = "correlation-id"
	fieldReplyTo         = "reply-to"

	// fieldSymfony is the only field of Symfony's transport: body and headers in JSON.
	fieldSymfony = "message"
	// fieldPacked contains, in JSON, the fields of an entry that has more fields than a script can take.
	fieldPacked = "holdfast-fields"
)

const (
	// maxHeaderBytes bounds the JSON of headers that is decoded.
	maxHeaderBytes = 1 << 20
	// maxEnvelopeBytes bounds Symfony's field: JSON may need six bytes for one byte of the body.
	maxEnvelopeBytes = 6*driver.MaxBodyBytes + maxHeaderBytes
	// maxPackedBytes bounds fieldPacked, whose values are in base64.
	maxPackedBytes = 2 * maxEnvelopeBytes
	// maxShortBytes bounds names, keys and content types, like headers.
	maxShortBytes = 8 << 10
	// maxFields is the largest number of fields of a copy. Lua's stack has room for 8000 values.
	maxFields = 1000
)

// message returns the message in an entry. Unreadable fields stay empty, and inbox.Message.Validate reports them.
func message(e entry, stream string, by *wire.Symfony) *inbox.Message {
	m := read(e.fields, by)
	m.Queue, m.Redelivered = stream, e.redelivered
	record.PutBack(m, in(e.fields))
	return m
}

// slow reports whether read decodes too much for the receiving goroutine.
func slow(fields map[string]any, by *wire.Symfony) bool {
	for _, decoded := range [...]string{fieldPacked, fieldSymfony, fieldHeaders} {
		if wire.SlowText(text(fields[decoded])) {
			return true
		}
	}
	body := text(fields[fieldBody])
	return wire.SlowText(body) && by.Slow([]byte(body), short(fields[fieldContentType]))
}

// read returns the message in the fields of an entry.
func read(fields map[string]any, by *wire.Symfony) *inbox.Message {
	fields = unpacked(fields)
	sent, named := text(fields[fieldBody]), decodeHeaders([]byte(text(fields[fieldHeaders])))
	if envelope := text(fields[fieldSymfony]); envelope != "" {
		sent, named = ofTransport(envelope)
	}
	media := cmp.Or(short(fields[fieldContentType]), named["Content-Type"])
	headers, body, media, readable := by.Opened(withAttributes(named, fields), []byte(sent), media)
	m := &inbox.Message{
		ID:              by.ID(short(fields[fieldID]), headers),
		Name:            by.Name(short(fields[fieldName]), headers),
		Body:            body,
		ContentType:     media,
		ContentEncoding: short(fields[fieldContentEncoding]), CorrelationID: short(fields[fieldCorrelationID]), ReplyTo: short(fields[fieldReplyTo]),
		Key:     cmp.Or(short(fields[fieldKey]), wire.EventAttribute(headers, "partitionkey")),
		Headers: headers,
	}
	record.Read(m, in(fields))
	m.PublishedAt = wire.PublishedAt(record.Time(text(fields[fieldCreatedAt])), headers, m.ID)
	if !readable { // otherwise a handler could mistake the envelope for its own JSON
		m.Name = ""
	}
	return m
}

// withAttributes adds the fields of a CloudEvent to the headers.
func withAttributes(headers map[string]string, fields map[string]any) map[string]string {
	for field, value := range fields {
		name, text, ok := wire.EventField(field, value)
		if !ok {
			continue
		}
		if headers == nil {
			headers = make(map[string]string, len(fields))
		}
		headers[name] = text
	}
	return headers
}

// ofTransport decodes the form of Symfony's transport: {"body": "…", "headers": {…}}. PHP's client serializes it
// once more by default, with its length: s:12:"…";.
func ofTransport(envelope string) (body string, headers map[string]string) {
	if rest, serialized := strings.CutPrefix(envelope, "s:"); serialized {
		length, rest, _ := strings.Cut(rest, `:"`)
		if inner, ends := strings.CutSuffix(rest, `";`); ends && length == strconv.Itoa(len(inner)) {
			envelope = inner
		}
	}
	if len(envelope) > maxEnvelopeBytes {
		return "", nil
	}
	var parts struct {
		Body    string          `json:"body"`
		Headers json.RawMessage `json:"headers"`
	}
	if err := json.Unmarshal([]byte(envelope), &parts); err != nil {
		return "", nil
	}
	return parts.Body, decodeHeaders(parts.Headers)
}

// decodeHeaders decodes a JSON object. PHP writes an empty object as an array. Values that are not strings, or too
// long, are omitted.
func decodeHeaders(data []byte) map[string]string {
	if len(data) <= len("{}") || len(data) > maxHeaderBytes {
		return nil
	}
	var values map[string]any
	if err := json.Unmarshal(data, &values); err != nil {
		return nil
	}
	headers := make(map[string]string, len(values))
	for name, value := range values {
		if _, ok := value.(string); !ok {
			continue
		}
		if s, ok := wire.HeaderString(value); ok {
			headers[name] = s
		}
	}
	return headers
}

// short returns a text for handlers and lists, or "" if it is too long.
func short(value any) string {
	s := text(value)
	if len(s) > maxShortBytes {
		return ""
	}
	return s
}

// in returns the header of fields.
func in(fields map[string]any) record.Header {
	return func(name string) string { return text(fields[name]) }
}

// packed returns fields that scripts can take.
func packed(fields map[string]any) map[string]any {
	if len(fields) <= maxFields {
		return fields
	}
	raw := make(map[string][]byte, len(fields)) // JSON preserves bytes, but not texts that are not UTF-8
	for name, value := range fields {
		raw[strconv.QuoteToASCII(name)] = []byte(text(value))
	}
	data, _ := json.Marshal(raw) // strings and bytes can always be encoded
	return map[string]any{fieldPacked: string(data)}
}

// unpacked returns the fields inside fieldPacked.
func unpacked(fields map[string]any) map[string]any {
	data := text(fields[fieldPacked])
	if data == "" || len(data) > maxPackedBytes {
		return fields
	}
	var raw map[string][]byte
	if err := json.Unmarshal([]byte(data), &raw); err != nil {
		return fields
	}
	all := make(map[string]any, len(raw)+len(fields))
	for name, value := range raw {
		if plain, err := strconv.Unquote(name); err == nil {
			all[plain] = string(value)
		}
	}
	for name, value := range fields {
		if wire.Own(name) {
			all[name] = value
		}
	}
	return all
}
