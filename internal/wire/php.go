package wire

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Symfony's default serializer, PhpSerializer, puts message and stamps into the body in PHP's own format. It
// puts backslashes before quotes, and uses base64 if the text is not UTF-8.

const (
	envelopeClass = `Symfony\Component\Messenger\Envelope`
	// envelopeStart starts such a body; envelopeStart64 starts one in base64.
	envelopeStart   = `O:36:\"Symfony\\Component\\Messenger\\Envelope\":`
	envelopeStart64 = "TzozNjpcIlN5bWZvbnlcXENvbXBvbmVudFxcTWVzc2VuZ2VyXFxFbnZlbG9wZVwi"
	// maxNesting bounds the nesting of values.
	maxNesting = 64
	// maxStamps bounds the number of stamp classes to read.
	maxStamps = 64
	// maxProperties bounds the properties of an object with its own class.
	maxProperties = 1000
	// maxBody bounds the input and the output: no consumer accepts more (inbox/driver.MaxBodyBytes).
	maxBody = 16 << 20
)

var errPHP = errors.New("not the format of Symfony's PhpSerializer")

// FromPHP reads the body of a message of Symfony's PhpSerializer. It returns the headers that Symfony's other
// serializer would send (class and stamps), and the message's properties as JSON.
//
// It leaves out stamps over 8 KiB, and stamps whose name is not a class. In other stamps, null or U+FFFD
// replaces values that JSON cannot represent. False: the body is something else, its message has a value that
// JSON cannot represent, such as a reference, or it is over 16 MiB as it is or as JSON. Time and memory grow
// with the length of the body, whatever its bytes are.
func FromPHP(body []byte) (headers map[string]string, properties []byte, ok bool) {
	switch {
	case len(body) > maxBody:
		return nil, nil, false
	case bytes.HasPrefix(body, []byte(envelopeStart)):
	case bytes.HasPrefix(body, []byte(envelopeStart64)):
		plain, err := base64.StdEncoding.AppendDecode(nil, body)
		if err != nil {
			return nil, nil, false
		}
		body = plain
	default:
		return nil, nil, false
	}
	body = unslash(body)
	first := php{in: body, planning: true}
	if _, _, err := first.envelope(); err != nil || len(first.in) > 0 {
		return nil, nil, false
	}
	second := php{in: body, plan: first.plan}
	headers, properties, err := second.envelope()
	return headers, properties, err == nil
}

// unslash is PHP's stripslashes.
func unslash(body []byte) []byte {
	plain := make([]byte, 0, len(body))
	for i := 0; i < len(body); i++ {
		c := body[i]
		if c == '\\' && i+1 < len(body) {
			i++
			if c = body[i]; c == '0' {
				c = 0
			}
		}
		plain = append(plain, c)
	}
	return plain
}

// php reads serialized values and writes them as JSON, in two passes. Some of the JSON depends on bytes that
// come later, and moving written bytes would take time that grows with the square of the body. The first pass
// decides and writes nothing. The second pass writes, following the decisions in the same order.
type php struct {
	in       []byte // the rest
	out      []byte
	depth    int
	planning bool   // this is the first pass
	plan     []bool // for each array: is it a list; for each property of a class: is it left out
	// stamps means that the reader is in the stamps, which must not keep their message from its handler. Values
	// that JSON cannot represent are replaced, and nothing beyond maxHeader is written.
	stamps bool
}

// envelope reads the stamps by their classes, and the message.
func (p *php) envelope() (headers map[string]string, properties []byte, err error) {
	class, n, err := p.object()
	if err != nil || class != envelopeClass {
		return nil, nil, errPHP
	}
	headers = map[string]string{}
	for range n {
		name, err := p.property()
		if err != nil {
			return nil, nil, err
		}
		if name == "stamps" {
			if err := p.allStamps(headers); err != nil {
				return nil, nil, err
			}
			continue
		}
		p.out = nil
		if name == "message" && properties == nil {
			p.out = []byte{}
			if !p.planning {
				p.out = make([]byte, 0, len(p.in)) // usually the JSON is shorter
			}
			if headers[HeaderType], err = p.message(); err != nil {
				return nil, nil, err
			}
			properties = p.out
			continue
		}
		if err := p.value(); err != nil {
			return nil, nil, err
		}
	}
	if properties == nil || len(headers[HeaderType]) > maxHeader {
		return nil, nil, errPHP
	}
	return headers, properties, p.expect("}")
}

// allStamps reads lists of stamps by their classes. It returns as headers the stamps that fit into one.
func (p *php) allStamps(headers map[string]string) error {
	p.stamps = true
	defer func() { p.stamps = false }()
	n, err := p.open()
	if err != nil {
		return err
	}
	taken := 0
	for range n {
		name, err := p.key()
		if err != nil {
			return err
		}
		p.out = nil
		if err := p.stampsOf(); err != nil {
			return err
		}
		if taken == maxStamps || p.full() || len(name) > maxClass || !class.MatchString(name) {
			continue
		}
		headers[StampPrefix+name] = string(p.out)
		taken++
	}
	return p.expect("}")
}

// stampsOf reads the stamps of one class. A reference stands for a stamp that is already in the list.
func (p *php) stampsOf() error {
	n, err := p.open()
	if err != nil {
		return err
	}
	if err := p.write("["); err != nil {
		return err
	}
	read := 0
	for range n {
		if _, err := p.key(); err != nil {
			return err
		}
		if bytes.HasPrefix(p.in, []byte("r:")) {
			if _, err := p.scalar("r:"); err != nil {
				return err
			}
			continue
		}
		if p.comma(read) != nil || p.value() != nil {
			return errPHP
		}
		read++
	}
	if err := p.write("]"); err != nil {
		return err
	}
	return p.expect("}")
}

// message reads an object and returns its class.
func (p *php) message() (class string, err error) {
	class, n, err := p.object()
	if err != nil {
		return "", err
	}
	return class, p.members(class, n)
}

func (p *php) value() error {
	if p.depth++; p.depth > maxNesting || len(p.in) < 2 {
		return errPHP
	}
	defer func() { p.depth-- }()
	switch p.in[0] {
	case 'N':
		if err := p.write("null"); err != nil {
			return err
		}
		return p.expect("N;")
	case 'b':
		text, err := p.scalar("b:")
		if err != nil || text != "0" && text != "1" {
			return errPHP
		}
		return p.write(strconv.FormatBool(text == "1"))
	case 'i', 'd':
		return p.number()
	case 's':
		text, err := p.text()
		if err != nil {
			return err
		}
		if err := p.quote(text); err != nil {
			return err
		}
		return p.expect(";")
	case 'E': // an enumeration: class and case
		class, err := p.quoted("E:")
		if err != nil {
			return err
		}
		_, of, _ := strings.Cut(class, ":")
		if err := p.quote(of); err != nil {
			return err
		}
		return p.expect(";")
	case 'O':
		_, err := p.message()
		return err
	case 'a':
		return p.array()
	case 'r', 'R': // a reference to an earlier value
		if _, err := p.scalar(string(p.in[:1]) + ":"); err != nil || !p.stamps {
			return errPHP
		}
		return p.write("null")
	}
	return errPHP
}

func (p *php) number() error {
	text, err := p.scalar(string(p.in[:1]) + ":")
	if p.stamps && (text == "INF" || text == "-INF" || text == "NAN") {
		return p.write("null")
	}
	if err != nil || !json.Valid([]byte(text)) { // INF, NAN and texts are not JSON numbers
		return errPHP
	}
	if text[0] != '-' && (text[0] < '0' || text[0] > '9') {
		return errPHP
	}
	return p.write(text)
}

// quote writes a text in pieces, because each byte may become six.
func (p *php) quote(text string) error {
	if p.planning {
		return nil
	}
	if err := p.write(`"`); err != nil {
		return err
	}
	for len(text) > 0 {
		n := min(len(text), 64<<10)
		for n < len(text) && !utf8.RuneStart(text[n]) {
			n--
		}
		quoted, _ := json.Marshal(text[:n]) // a string can always be encoded
		if err := p.write(string(quoted[1 : len(quoted)-1])); err != nil {
			return err
		}
		text = text[n:]
	}
	return p.write(`"`)
}

// comma writes a comma before all members but the first.
func (p *php) comma(i int) error {
	if i == 0 {
		return nil
	}
	return p.write(",")
}

// full reports whether stamps are too long for a header. The rest of them is not written.
func (p *php) full() bool { return p.stamps && len(p.out) > maxHeader }

func (p *php) write(text string) error {
	if p.planning || p.full() {
		return nil
	}
	if len(p.out)+len(text) > maxBody {
		return errPHP
	}
	p.out = append(p.out, text...)
	return nil
}

// decide records a decision of the first pass and returns its index. The first pass may still change it.
func (p *php) decide(yes bool) int {
	p.plan = append(p.plan, yes)
	return len(p.plan) - 1
}

// decided returns the next decision of the first pass.
func (p *php) decided() bool {
	yes := p.plan[0]
	p.plan = p.plan[1:]
	return yes
}

// members reads the properties of an object up to the closing brace. Parent classes may have private properties
// of the same name: the object's own property wins. If two parent classes have the name and the object has not,
// it is an error.
func (p *php) members(class string, n int) error {
	if class != "stdClass" && n > maxProperties {
		return errPHP
	}
	if err := p.write("{"); err != nil {
		return err
	}
	own := &members{class: class, seen: map[string]member{}}
	written := 0
	for range n {
		name, err := p.key()
		if err != nil {
			return err
		}
		left := false            // left out of the JSON
		if class != "stdClass" { // stdClass has only its own properties, perhaps many
			if p.planning {
				name, err = own.add(p, name)
			} else {
				name, left = name[strings.LastIndexByte(name, 0)+1:], p.decided()
			}
		}
		start := len(p.out)
		if err != nil || p.comma(written) != nil || p.quote(name) != nil || p.write(":") != nil || p.value() != nil {
			return errPHP
		}
		if left {
			p.out = p.out[:start]
			continue
		}
		written++
	}
	if err := p.write("}"); err != nil {
		return err
	}
	return p.expect("}")
}

// members are the properties of one object in the first pass.
type members struct {
	class string
	seen  map[string]member
}

type member struct {
	decision int  // index in the plan: is it left out
	hidden   bool // private to a parent class
}

// add records a property and returns its name without PHP's visibility prefix.
func (m *members) add(p *php, name string) (string, error) {
	now := member{decision: p.decide(false)}
	if i := strings.LastIndexByte(name, 0); i >= 0 {
		owner := strings.TrimPrefix(name[:i], "\x00")
		name, now.hidden = name[i+1:], owner != "*" && owner != m.class
	}
	other, twice := m.seen[name]
	switch {
	case twice && other.hidden == now.hidden:
		return "", errPHP
	case twice && now.hidden:
		p.plan[now.decision] = true
		return name, nil
	case twice:
		p.plan[other.decision] = true
	}
	m.seen[name] = now
	return name, nil
}

// array reads a list, whose keys count from 0, or a map. The first pass finds out which one it is.
func (p *php) array() error {
	n, err := p.open()
	if err != nil {
		return err
	}
	isList := true
	decision := 0
	if p.planning {
		decision = p.decide(true)
	} else {
		isList = p.decided()
	}
	brackets := "{}"
	if isList {
		brackets = "[]"
	}
	if err := p.write(brackets[:1]); err != nil {
		return err
	}
	for i := range n {
		counts := bytes.HasPrefix(p.in, []byte("i:"+strconv.Itoa(i)+";"))
		if p.planning && !counts {
			p.plan[decision] = false
		}
		name, err := p.key()
		if err != nil || p.comma(i) != nil {
			return errPHP
		}
		if !isList && (p.quote(name) != nil || p.write(":") != nil) {
			return errPHP
		}
		if err := p.value(); err != nil {
			return err
		}
	}
	if err := p.write(brackets[1:]); err != nil {
		return err
	}
	return p.expect("}")
}

// object reads the start of an object, up to its properties.
func (p *php) object() (class string, n int, err error) {
	if class, err = p.quoted("O:"); err != nil {
		return "", 0, err
	}
	if err = p.expect(":"); err != nil {
		return "", 0, err
	}
	if n, err = p.count(); err != nil {
		return "", 0, err
	}
	return class, n, p.expect(":{")
}

// property reads a name and drops PHP's visibility prefix.
func (p *php) property() (string, error) {
	name, err := p.key()
	return name[strings.LastIndexByte(name, 0)+1:], err
}

// key reads a number or a text.
func (p *php) key() (string, error) {
	if bytes.HasPrefix(p.in, []byte("i:")) {
		return p.scalar("i:")
	}
	name, err := p.text()
	if err != nil {
		return "", err
	}
	return name, p.expect(";")
}

func (p *php) text() (string, error) { return p.quoted("s:") }

// quoted reads a length and that many bytes in quotation marks.
func (p *php) quoted(kind string) (string, error) {
	if err := p.expect(kind); err != nil {
		return "", err
	}
	n, err := p.count()
	if err != nil {
		return "", err
	}
	if err := p.expect(`:"`); err != nil {
		return "", err
	}
	if n > len(p.in) || !p.stamps && !utf8.Valid(p.in[:n]) {
		return "", errPHP
	}
	text := strings.ToValidUTF8(string(p.in[:n]), "\uFFFD")
	p.in = p.in[n:]
	return text, p.expect(`"`)
}

// count reads a length, which must not exceed the remaining input.
func (p *php) count() (int, error) {
	digits := 0
	for digits < min(len(p.in), 20) && p.in[digits] >= '0' && p.in[digits] <= '9' {
		digits++
	}
	n, err := strconv.Atoi(string(p.in[:digits]))
	if err != nil || n > len(p.in) {
		return 0, errPHP
	}
	p.in = p.in[digits:]
	return n, nil
}

// scalar reads the text between a kind and the semicolon.
func (p *php) scalar(kind string) (string, error) {
	if err := p.expect(kind); err != nil {
		return "", err
	}
	end := bytes.IndexByte(p.in[:min(len(p.in), 64)], ';')
	if end < 1 {
		return "", errPHP
	}
	text := string(p.in[:end])
	p.in = p.in[end+1:]
	return text, nil
}

func (p *php) expect(text string) error {
	if !bytes.HasPrefix(p.in, []byte(text)) {
		return errPHP
	}
	p.in = p.in[len(text):]
	return nil
}

// open reads the start of an array, up to its keys.
func (p *php) open() (n int, err error) {
	if err = p.expect("a:"); err != nil {
		return 0, err
	}
	if n, err = p.count(); err != nil {
		return 0, err
	}
	return n, p.expect(":{")
}
