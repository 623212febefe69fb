package wire

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"mime"
	"net/url"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/outbox/format"
)

const (
	// EventPrefix starts the header of a CloudEvent's attribute; the attribute's name follows.
	EventPrefix = "cloudEvents:"
	// eventPrefixJMS is the alternative prefix of the AMQP binding, for clients that cannot use a colon.
	eventPrefixJMS = "cloudEvents_"
	// EventFieldPrefix starts the field of an attribute on Redis.
	EventFieldPrefix = "ce_"

	eventVersion = "1.0"
	// eventMedia starts every content type of events in structured mode.
	eventMedia     = "application/cloudevents"
	structuredType = "application/cloudevents+json; charset=utf-8"

	maxSource = 1024
	// maxMembers bounds the members of an event in structured mode: attributes and data.
	maxMembers = 256
	// maxEnvelope bounds an event in structured mode: the largest body in base64, and its attributes.
	maxEnvelope = maxBody/3*4 + 1<<20
)

var errEnvelope = errors.New("not an event in JSON")

// Event has the parts of a message that become attributes.
type Event struct {
	ID        uuid.UUID
	Name, Key string
	Time      time.Time
}

// Events writes CloudEvents. A nil *Events means that messages are not sent as events.
type Events struct{ format format.CloudEvents }

func newEvents(f format.CloudEvents) (*Events, error) {
	_, err := url.Parse(f.Source)
	if f.Source == "" || len(f.Source) > maxSource || !utf8.ValidString(f.Source) || err != nil {
		return nil, fmt.Errorf("Source: %.100q is not a URI reference of 1 to %d bytes", f.Source, maxSource)
	}
	return &Events{f}, nil
}

// Attributes returns the attributes of an event, except the content type. headers are the headers of the
// message.
func (w *Events) Attributes(e Event, headers map[string]string) map[string]string {
	all := make(map[string]string, 8)
	all["source"] = w.format.Source
	if !e.Time.IsZero() {
		all["time"] = e.Time.UTC().Format(time.RFC3339Nano)
	}
	if e.Key != "" {
		all["partitionkey"] = e.Key
	}
	for name, value := range headers {
		if name, attribute := strings.CutPrefix(name, EventPrefix); attribute && attributeName(name) && allowed(name, value) {
			all[name] = value
		}
	}
	delete(all, "datacontenttype") // the content type has its own field
	delete(all, "data")
	all["specversion"], all["id"], all["type"] = eventVersion, e.ID.String(), e.Name
	return all
}

// allowed reports whether a header may be an attribute. An empty attribute, or an invalid time, would make
// the event invalid.
func allowed(name, value string) bool {
	if name == "time" {
		_, err := time.Parse(time.RFC3339Nano, value)
		return err == nil
	}
	return value != ""
}

// Structured reports whether the body contains the whole event.
func (w *Events) Structured() bool { return w.format.Structured }

// Envelope returns an event in JSON, and its content type.
func Envelope(attributes map[string]string, contentType string, body []byte) (envelope []byte, structured string, err error) {
	attributes = maps.Clone(attributes)
	attributes["datacontenttype"] = contentType
	head, err := json.Marshal(attributes)
	if err != nil {
		return nil, "", fmt.Errorf("encode attributes: %w", err)
	}
	data := body
	member := `,"data":`
	switch {
	case !isJSON(contentType):
		member = `,"data_base64":`
		data, _ = json.Marshal(body) // bytes can always be encoded
	case !json.Valid(body):
		return nil, "", errors.New("the body is not valid JSON, but its content type is JSON")
	}
	envelope = append(envelope, head[:len(head)-1]...)
	envelope = append(envelope, member...)
	envelope = append(envelope, data...)
	return append(envelope, '}'), structuredType, nil
}

// isEnvelope reports whether a body contains events in a form that a handler could take for its own JSON. It
// accepts content types with malformed parameters.
func isEnvelope(contentType string) bool {
	media, _, _ := strings.Cut(contentType, ";")
	media = strings.ToLower(strings.TrimSpace(media))
	return strings.HasPrefix(media, eventMedia) && strings.HasSuffix(media, "+json")
}

// open reverses Envelope. It returns the attributes as headers, next to the given headers; given headers
// that look like attributes are dropped. False: the body is not a single event of version 1.0.
func open(envelope []byte, contentType string, headers map[string]string) (all map[string]string, body []byte, dataType string, ok bool) {
	if media, _, err := mime.ParseMediaType(contentType); err != nil || media != eventMedia+"+json" {
		return nil, nil, "", false
	}
	members, err := membersOf(envelope)
	if err != nil {
		return nil, nil, "", false
	}
	all = make(map[string]string, len(headers)+len(members))
	for name, value := range headers {
		if !NamesAttribute(name) {
			all[name] = value
		}
	}
	for name, raw := range members {
		if value, ok := attributeValue(raw); ok && attributeName(name) && name != "data" && name != "datacontenttype" {
			all[EventPrefix+name] = value
		}
	}
	dataType, _ = attributeValue(members["datacontenttype"])
	body, err = dataOf(members, dataType)
	if err != nil || !isEvent(all) {
		return nil, nil, "", false
	}
	if dataType == "" {
		dataType = "application/json" // the default of the JSON format
	}
	return all, body, dataType, true
}

// membersOf reads one object with nothing behind it. It stops at the first member too many, because a map of
// all possible members could be a hundred times as large as the envelope.
func membersOf(envelope []byte) (map[string]json.RawMessage, error) {
	if len(envelope) > maxEnvelope {
		return nil, errEnvelope
	}
	d := json.NewDecoder(bytes.NewReader(envelope))
	if open, err := d.Token(); err != nil || open != json.Delim('{') {
		return nil, errEnvelope
	}
	members := make(map[string]json.RawMessage, 16)
	for read := 0; d.More(); read++ {
		token, err := d.Token()
		name, named := token.(string)
		if err != nil || !named || read == maxMembers {
			return nil, errEnvelope
		}
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			return nil, err
		}
		members[name] = value
	}
	if _, err := d.Token(); err != nil {
		return nil, err
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, errEnvelope
	}
	return members, nil
}

func dataOf(members map[string]json.RawMessage, dataType string) ([]byte, error) {
	var text string
	if raw, binary := given(members, "data_base64"); binary {
		if _, both := given(members, "data"); both {
			return nil, errEnvelope
		}
		if err := json.Unmarshal(raw, &text); err != nil {
			return nil, err
		}
		return base64.StdEncoding.DecodeString(text)
	}
	raw := members["data"]
	if dataType != "" && !isJSON(dataType) && json.Unmarshal(raw, &text) == nil {
		return []byte(text), nil
	}
	return raw, nil
}

// given returns a member that exists and is not null. Some senders write null for a missing member.
func given(members map[string]json.RawMessage, name string) (json.RawMessage, bool) {
	raw, there := members[name]
	return raw, there && string(raw) != "null"
}

// attributeValue returns a string, a number or a boolean as text.
func attributeValue(raw json.RawMessage) (string, bool) {
	var v any
	if len(raw) == 0 || len(raw) > maxHeader || json.Unmarshal(raw, &v) != nil {
		return "", false
	}
	switch v := v.(type) {
	case string:
		return v, true
	case float64, bool:
		return string(raw), true
	}
	return "", false
}

// EventField returns the header for a field of an entry on Redis. False: the field is not an attribute, or
// it is longer than a header may be, or has bytes that a header may not have.
func EventField(field string, value any) (name, text string, ok bool) {
	attribute, ok := strings.CutPrefix(field, EventFieldPrefix)
	if !ok || !attributeName(attribute) {
		return "", "", false
	}
	text, ok = HeaderString(value)
	return EventPrefix + attribute, text, ok
}

// attributeName reports whether a text can be the name of an attribute.
func attributeName(s string) bool {
	for i := range len(s) {
		if (s[i] < 'a' || s[i] > 'z') && (s[i] < '0' || s[i] > '9') {
			return false
		}
	}
	return s != ""
}

// isEvent reports whether headers have the attributes that every event has.
func isEvent(headers map[string]string) bool {
	return attributeOf(headers, "specversion") == eventVersion && attributeOf(headers, "id") != "" &&
		attributeOf(headers, "source") != "" && attributeOf(headers, "type") != ""
}

// EventAttribute returns an attribute from the headers of an event. It returns "" if the headers are not an
// event's.
func EventAttribute(headers map[string]string, name string) string {
	if len(headers) == 0 || !isEvent(headers) {
		return ""
	}
	return attributeOf(headers, name)
}

// eventTime returns the time of an event; zero if there is none.
func eventTime(headers map[string]string) time.Time {
	t, err := time.Parse(time.RFC3339Nano, EventAttribute(headers, "time"))
	if err != nil {
		return time.Time{}
	}
	return t
}

// NamesAttribute reports whether a header is read as an attribute of an event.
func NamesAttribute(header string) bool {
	return strings.HasPrefix(header, EventPrefix) || strings.HasPrefix(header, eventPrefixJMS)
}

// Identifies reports whether a header is part of an event's identity.
func Identifies(name string) bool {
	for _, prefix := range [...]string{EventPrefix, eventPrefixJMS} {
		if attribute, ok := strings.CutPrefix(name, prefix); ok {
			switch attribute {
			case "specversion", "id", "source", "type", "partitionkey":
				return true
			}
		}
	}
	return false
}

func attributeOf(headers map[string]string, name string) string {
	if value, ok := headers[EventPrefix+name]; ok {
		return value
	}
	return headers[eventPrefixJMS+name]
}

func isJSON(contentType string) bool {
	media, _, err := mime.ParseMediaType(contentType)
	return err == nil && (media == "application/json" || strings.HasSuffix(media, "+json"))
}
