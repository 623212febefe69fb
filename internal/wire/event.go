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
	// EventPrefix begins the header of an attribute of a CloudEvent; its name follows.
	EventPrefix = "cloudEvents:"
	// eventPrefixJMS is the other one of the AMQP binding, which is for clients that cannot have a colon.
	eventPrefixJMS = "cloudEvents_"
	// EventFieldPrefix begins the field of an attribute on Redis.
	EventFieldPrefix = "ce_"

	eventVersion = "1.0"
	// eventMedia begins every content type of events in structured mode.
	eventMedia     = "application/cloudevents"
	structuredType = "application/cloudevents+json; charset=utf-8"

	maxSource = 1024
	// maxMembers bounds those of an event in structured mode, attributes and data.
	maxMembers = 256
	// maxEnvelope bounds an event in structured mode: the largest body in base64, and its attributes.
	maxEnvelope = maxBody/3*4 + 1<<20
)

var errEnvelope = errors.New("no event in JSON")

// Event is what of a message becomes attributes.
type Event struct {
	ID        uuid.UUID
	Name, Key string
	Time      time.Time
}

// Events writes CloudEvents; nil writes none.
type Events struct{ format format.CloudEvents }

func newEvents(f format.CloudEvents) (*Events, error) {
	_, err := url.Parse(f.Source)
	if f.Source == "" || len(f.Source) > maxSource || !utf8.ValidString(f.Source) || err != nil {
		return nil, fmt.Errorf("Source: %.100q is no URI reference of 1 to %d bytes", f.Source, maxSource)
	}
	return &Events{f}, nil
}

// Attributes are those of an event but for the content type. The headers are those of the message.
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
	delete(all, "datacontenttype") // it has a place of its own
	delete(all, "data")
	all["specversion"], all["id"], all["type"] = eventVersion, e.ID.String(), e.Name
	return all
}

// allowed reports whether a header may be an attribute: an event with an empty one, or with what is no time,
// would be none.
func allowed(name, value string) bool {
	if name == "time" {
		_, err := time.Parse(time.RFC3339Nano, value)
		return err == nil
	}
	return value != ""
}

// Structured reports whether whole events are in the body.
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
		return nil, "", errors.New("the body is not the JSON that its content type says")
	}
	envelope = append(envelope, head[:len(head)-1]...)
	envelope = append(envelope, member...)
	envelope = append(envelope, data...)
	return append(envelope, '}'), structuredType, nil
}

// isEnvelope reports whether a body has whole events in a form that could be taken for a handler's JSON,
// also where the parameters of its content type cannot be parsed.
func isEnvelope(contentType string) bool {
	media, _, _ := strings.Cut(contentType, ";")
	media = strings.ToLower(strings.TrimSpace(media))
	return strings.HasPrefix(media, eventMedia) && strings.HasSuffix(media, "+json")
}

// open returns what Envelope was given, the attributes as headers beside those that are given, of which none
// counts as an attribute. False: it is no single event of version 1.0.
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
		dataType = "application/json" // as the JSON format has it
	}
	return all, body, dataType, true
}

// membersOf reads one object and nothing behind it. It stops at the first member too many: a map of all that
// could be in an envelope would be a hundred times as large.
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

// given returns a member that is there and not null, as which some write what is absent.
func given(members map[string]json.RawMessage, name string) (json.RawMessage, bool) {
	raw, there := members[name]
	return raw, there && string(raw) != "null"
}

// attributeValue returns a text, a number or a truth value as text.
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

// EventField returns the header for a field of an entry on Redis. False: it is no attribute, or longer or of
// other bytes than a header may be.
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

// isEvent reports whether headers have what every event has.
func isEvent(headers map[string]string) bool {
	return attributeOf(headers, "specversion") == eventVersion && attributeOf(headers, "id") != "" &&
		attributeOf(headers, "source") != "" && attributeOf(headers, "type") != ""
}

// EventAttribute returns an attribute from the headers of an event. It is empty for what is no event.
func EventAttribute(headers map[string]string, name string) string {
	if len(headers) == 0 || !isEvent(headers) {
		return ""
	}
	return attributeOf(headers, name)
}

// eventTime is the time of an event; zero where there is none.
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

// Identifies reports whether a header says which event a message is.
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
