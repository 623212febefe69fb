package wire

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/outbox/format"
)

// Headers that Symfony Messenger writes and reads.
const (
	// HeaderType carries the class of a message, or its name.
	HeaderType = "type"
	// StampPrefix starts the name of a header with stamps; their class follows.
	StampPrefix = "X-Message-Stamp-"
)

// The stamp classes that are read without configuration, in any namespace or none.
const (
	idStamp   = "MessageIdStamp"
	nameStamp = "MessageNameStamp"
)

// symfonyIDStamp is the class of Symfony 8.2, whose property is called id.
const symfonyIDStamp = `Symfony\Component\Messenger\Stamp\MessageIdStamp`

// maxClass bounds the name of a PHP class, so that the name with its prefix fits into an AMQP table.
const maxClass = 200

var class = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*(\\[A-Za-z_][A-Za-z0-9_]*)*$`)

// Symfony writes and reads the headers of a format.Symfony.
type Symfony struct {
	format format.Symfony
	names  map[string]string // by class
	php    bool              // read bodies of PhpSerializer
}

// NewSymfony returns the Symfony form of a format, or every violation in it. It also reads bodies of PhpSerializer.
func NewSymfony(f format.Symfony) (*Symfony, error) {
	s := &Symfony{format: f, php: true, names: make(map[string]string, len(f.Classes))}
	s.format.Classes = maps.Clone(f.Classes)
	var problems []error
	refuse := func(what, name string) {
		if len(name) > maxClass || !class.MatchString(name) {
			problems = append(problems, fmt.Errorf("%s: %q is not a PHP class of at most %d bytes, without a leading backslash", what, name, maxClass))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(f.Classes)) {
		of := f.Classes[name]
		refuse(fmt.Sprintf("Classes[%q]", name), of)
		if other, taken := s.names[of]; taken {
			problems = append(problems, fmt.Errorf("Classes: %q is the class of %q and of %q", of, other, name))
		}
		s.names[of] = name
	}
	if f.IDStamp != "" {
		refuse("IDStamp", f.IDStamp)
	}
	if f.NameStamp != "" {
		refuse("NameStamp", f.NameStamp)
	}
	if f.IDStamp != "" && f.IDStamp == f.NameStamp {
		problems = append(problems, errors.New("IDStamp and NameStamp are the same class"))
	}
	return s, errors.Join(problems...)
}

// On reports whether messages are sent for Symfony.
func (s *Symfony) On() bool {
	return len(s.format.Classes) > 0 || s.format.IDStamp != "" || s.format.NameStamp != ""
}

// Headers calls set for each header that Symfony needs.
func (s *Symfony) Headers(id uuid.UUID, name string, set func(name, value string)) {
	if !s.On() {
		return
	}
	typ := name
	if of, known := s.format.Classes[name]; known {
		typ = of
	}
	set(HeaderType, typ)
	if s.format.IDStamp != "" {
		set(StampPrefix+s.format.IDStamp, encodeID(s.format.IDStamp, id))
	}
	if s.format.NameStamp != "" {
		text, _ := json.Marshal([]stamp{{MessageName: name}}) // strings can always be encoded
		set(StampPrefix+s.format.NameStamp, string(text))
	}
}

// ID returns a message's id. It tries the transport's property, then a stamp, then the id of a CloudEvent, and
// returns the first one that is a UUID in canonical form. It returns uuid.Nil if there is none.
func (s *Symfony) ID(property string, headers map[string]string) uuid.UUID {
	if id, ok := parseID(property); ok {
		return id
	}
	last, _ := decodeStamp(stampOf(headers, s.format.IDStamp, idStamp))
	if id, ok := last.id(); ok {
		return id
	}
	id, _ := parseID(EventAttribute(headers, "id"))
	return id
}

// Name returns a message's name: the transport's property, else a stamp's, else the header type, else the type of a
// CloudEvent. It maps a known class to its name.
func (s *Symfony) Name(property string, headers map[string]string) string {
	name := property
	if name == "" {
		last, _ := decodeStamp(stampOf(headers, s.format.NameStamp, nameStamp))
		name = last.MessageName
	}
	if name == "" {
		name = headers[HeaderType]
	}
	if name == "" {
		name = EventAttribute(headers, "type")
	}
	if known, ok := s.names[name]; ok {
		return known
	}
	return name
}

// stampOf returns the header with stamps of a class. If there is none, it returns one of any class with that short
// name, the same one at each delivery.
func stampOf(headers map[string]string, class, short string) string {
	if value := headers[StampPrefix+class]; class != "" && value != "" {
		return value
	}
	if value := headers[StampPrefix+short]; value != "" {
		return value
	}
	first := ""
	for name := range headers {
		stamp := strings.HasPrefix(name, StampPrefix) && strings.HasSuffix(name, `\`+short)
		if stamp && (first == "" || name < first) {
			first = name
		}
	}
	return headers[first]
}

// parseID accepts the canonical form only, and not the nil UUID, which stands for no id.
func parseID(text string) (uuid.UUID, bool) {
	if len(text) != 36 {
		return uuid.Nil, false
	}
	id, err := uuid.Parse(text)
	return id, err == nil && id != uuid.Nil
}

// stamp has the members of stamps that we use.
type stamp struct {
	MessageID   string `json:"messageId,omitempty"`
	ID          any    `json:"id,omitempty"` // in Symfony's own class; other stamps may have a number
	MessageName string `json:"messageName,omitempty"`
}

// id returns the id in a stamp of a configured class or of one called MessageIdStamp.
func (s stamp) id() (uuid.UUID, bool) {
	own, _ := s.ID.(string)
	for _, text := range [...]string{s.MessageID, own} {
		if id, ok := parseID(text); ok {
			return id, true
		}
		if id, ok := parseDigits(text); ok {
			return id, true
		}
	}
	return uuid.Nil, false
}

// parseDigits reads 32 hexadecimal digits, as Symfony writes an id where its component Uid is absent. Those are random.
// They become a UUID v7 without a time, always the same one. Zeros stand for no id.
func parseDigits(text string) (uuid.UUID, bool) {
	if len(text) != 32 {
		return uuid.Nil, false
	}
	id, err := uuid.Parse(text)
	if err != nil || id == uuid.Nil {
		return uuid.Nil, false
	}
	if ids.Check(id) != nil {
		clear(id[:6])
		id[6], id[8] = id[6]&0x0f|0x70, id[8]&0x3f|0x80
	}
	return id, true
}

// encodeID returns the header of a stamp of a class with an id.
func encodeID(class string, id uuid.UUID) string {
	of := stamp{MessageID: id.String()}
	if class == symfonyIDStamp {
		of = stamp{ID: id.String()}
	}
	text, _ := json.Marshal([]stamp{of}) // strings can always be encoded
	return string(text)
}

// CarriesID reports whether a header has stamps with an id. A property called id counts only in a class called
// MessageIdStamp: stamps of transports and flows have one, too.
func CarriesID(name, value string) bool {
	class, isStamp := strings.CutPrefix(name, StampPrefix)
	if !isStamp {
		return false
	}
	last, _ := decodeStamp(value)
	if class != idStamp && !strings.HasSuffix(class, `\`+idStamp) {
		last.ID = nil
	}
	_, ok := last.id()
	return ok
}

// decodeStamp returns the last stamp in a header, which is the one that counts.
func decodeStamp(value string) (stamp, bool) {
	if value == "" || len(value) > maxHeader {
		return stamp{}, false
	}
	var stamps []json.RawMessage
	if err := json.Unmarshal([]byte(value), &stamps); err != nil || len(stamps) == 0 {
		return stamp{}, false
	}
	var last stamp
	if err := json.Unmarshal(stamps[len(stamps)-1], &last); err != nil {
		return stamp{}, false
	}
	return last, true
}

// slowBody is the length from which decoding a body takes about a millisecond or more.
const slowBody = 64 << 10

// Opened returns headers, body and content type of a message. A structured CloudEvent becomes its binary form. If the
// format is Symfony's, a body of Symfony's PhpSerializer becomes the form of Symfony's other serializer. All other
// messages are returned unchanged. False: the body is an envelope that cannot be read; it is returned unchanged. Time
// and memory grow with the length of the body.
func (s *Symfony) Opened(headers map[string]string, body []byte, contentType string) (map[string]string, []byte, string, bool) {
	if isEnvelope(contentType) {
		if all, data, dataType, ok := open(body, contentType, headers); ok {
			return all, data, dataType, true
		}
		return headers, body, contentType, false
	}
	if !s.php {
		return headers, body, contentType, true
	}
	fromPHP, properties, ok := FromPHP(body)
	if !ok {
		return headers, body, contentType, true
	}
	maps.Copy(fromPHP, headers)
	return fromPHP, properties, JSON, true
}

// Slow reports whether Opened may take so long that it should not run on a goroutine that others wait for.
func (s *Symfony) Slow(body []byte, contentType string) bool {
	return len(body) > slowBody && (isEnvelope(contentType) || s.php && isPHP(body))
}

// isPHP reports whether a body starts like a body of PhpSerializer.
func isPHP(body []byte) bool {
	return bytes.HasPrefix(body, []byte(envelopeStart)) || bytes.HasPrefix(body, []byte(envelopeStart64))
}

// SlowText reports whether a text of a message, such as JSON with its headers, is too long to be decoded on a
// goroutine that others wait for.
func SlowText(text string) bool { return len(text) > slowBody }
