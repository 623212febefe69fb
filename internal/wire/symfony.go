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

	"github.com/holdfast-go/holdfast/outbox/format"
)

// Headers that Symfony Messenger writes and reads.
const (
	// HeaderType carries the class of a message, or its name.
	HeaderType = "type"
	// StampPrefix begins the name of a header with stamps; their class follows.
	StampPrefix = "X-Message-Stamp-"
)

// The stamps that are read without being configured: these classes, of any namespace or none.
const (
	idStamp   = "MessageIdStamp"
	nameStamp = "MessageNameStamp"
)

// maxClass bounds the name of a PHP class: with the prefix it is a name in a table of AMQP.
const maxClass = 200

var class = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*(\\[A-Za-z_][A-Za-z0-9_]*)*$`)

// Symfony writes and reads the headers of a format.Symfony.
type Symfony struct {
	format format.Symfony
	names  map[string]string // by class
	php    bool              // bodies of PhpSerializer are read
}

// NewSymfony returns what goes by a format, or every violation in it. It reads bodies of PhpSerializer.
func NewSymfony(f format.Symfony) (*Symfony, error) {
	s := &Symfony{format: f, php: true, names: make(map[string]string, len(f.Classes))}
	s.format.Classes = maps.Clone(f.Classes)
	var problems []error
	refuse := func(what, name string) {
		if len(name) > maxClass || !class.MatchString(name) {
			problems = append(problems, fmt.Errorf("%s: %q is no PHP class of at most %d bytes, without a leading backslash", what, name, maxClass))
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

// Headers calls set with each header of a message.
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
		set(StampPrefix+s.format.IDStamp, EncodeStamp(id))
	}
	if s.format.NameStamp != "" {
		text, _ := json.Marshal([]stamp{{MessageName: name}}) // strings can always be encoded
		set(StampPrefix+s.format.NameStamp, string(text))
	}
}

// ID returns a message's id: that of the transport, else that of a stamp, else that of a CloudEvent,
// whichever is a UUID in its canonical form first. There may be none.
func (s *Symfony) ID(property string, headers map[string]string) uuid.UUID {
	if id, ok := parseID(property); ok {
		return id
	}
	last, _ := decodeStamp(stampOf(headers, s.format.IDStamp, idStamp))
	if id, ok := parseID(last.MessageID); ok {
		return id
	}
	id, _ := parseID(EventAttribute(headers, "id"))
	return id
}

// Name returns a message's name: that of the transport, else that of a stamp, else the header type, else
// the type of a CloudEvent. A known class becomes its name.
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

// stampOf returns the header with stamps of a class or, where there is none, of any class of that short
// name. Of several the same is taken at each delivery.
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

// parseID takes the canonical form only.
func parseID(text string) (uuid.UUID, bool) {
	if len(text) != 36 {
		return uuid.Nil, false
	}
	id, err := uuid.Parse(text)
	return id, err == nil
}

// stamp is what we know of stamps.
type stamp struct {
	MessageID   string `json:"messageId,omitempty"`
	MessageName string `json:"messageName,omitempty"`
}

// EncodeStamp returns the header of a stamp with an id.
func EncodeStamp(id uuid.UUID) string {
	return `[{"messageId":"` + id.String() + `"}]`
}

// CarriesID reports whether a header has stamps with an id.
func CarriesID(name, value string) bool {
	if !strings.HasPrefix(name, StampPrefix) {
		return false
	}
	last, _ := decodeStamp(value)
	_, ok := parseID(last.MessageID)
	return ok
}

// decodeStamp returns the last of the stamps in a header, which is the one that counts.
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

// Opened returns headers, body and content type of a message as they are. A structured CloudEvent becomes
// its binary form. Where the format is Symfony's, a body of Symfony's PhpSerializer becomes what its other serializer
// would have sent. False: the body is an envelope that cannot be read, and everything is as it was. Its time and
// memory grow with the length of the body.
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

// Slow reports whether Opened decodes so much that it does not belong on a goroutine that others wait for.
func (s *Symfony) Slow(body []byte, contentType string) bool {
	return len(body) > slowBody && (isEnvelope(contentType) || s.php && isPHP(body))
}

// isPHP reports whether a body begins as PhpSerializer's do.
func isPHP(body []byte) bool {
	return bytes.HasPrefix(body, []byte(envelopeStart)) || bytes.HasPrefix(body, []byte(envelopeStart64))
}

// SlowText reports whether a text of a message, such as JSON with its headers, is too long to be decoded on a
// goroutine that others wait for.
func SlowText(text string) bool { return len(text) > slowBody }
