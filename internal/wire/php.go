package wire

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"strconv"
	"strings"
)

// Symfony's PhpSerializer, its default, puts message and stamps into the body, in PHP's own format, with
// slashes before quotes and, where it is not UTF-8, in base64.

const (
	envelopeClass = `Symfony\Component\Messenger\Envelope`
	// envelopeStart begins such a body, and envelopeStart64 one in base64.
	envelopeStart   = `O:36:\"Symfony\\Component\\Messenger\\Envelope\":`
	envelopeStart64 = "TzozNjpcIlN5bWZvbnlcXENvbXBvbmVudFxcTWVzc2VuZ2VyXFxFbnZlbG9wZVwi"
	// maxNesting bounds the nesting of values.
	maxNesting = 64
	// maxStamps bounds the classes of stamps that are taken.
	maxStamps = 64
	// maxProperties bounds those of an object with a class of its own.
	maxProperties = 1000
	// maxBody bounds what is read and what becomes of it: no consumer takes more (inbox/driver.MaxBodyBytes).
	maxBody = 16 << 20
)

var errPHP = errors.New("not what Symfony's PhpSerializer writes")

// FromPHP reads the body of a message of Symfony's PhpSerializer: it returns what its other serializer has
// in headers, class and stamps, and the message's properties as JSON. Stamps over 8 KiB, and those of what is
// no class, are left out. In the others null or U+FFFD replaces what JSON has no form for. False: the
// body is something else, its message has what JSON has no form for, such as a reference, or it is over 16 MiB,
// as it is or as JSON. Time and memory grow with the length of the body, whatever its bytes are.
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

// php reads serialized values and writes them as JSON, in two passes: some of the JSON depends on bytes that
// come later, and moving what is written would take time that grows with the square of the body. The first
// pass decides and writes nothing. The second pass writes, by the decisions in the same order.
type php struct {
	in       []byte // what is left
	out      []byte
	depth    int
	planning bool   // this is the first pass
	plan     []bool // of each array whether it is a list, of each property of a class whether it is left out
	// stamps tells that stamps are read, which must not keep their message from its handler: what JSON has
	// no form for is replaced, and what is over maxHeader is not written.
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
				p.out = make([]byte, 0, len(p.in)) // JSON of the usual is shorter
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

// allStamps reads lists of stamps by their classes, and takes as headers those that could be some.
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

// stampsOf reads the stamps of one class. A reference is one that is in the list already.
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

// value reads one value.
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
	case 'r', 'R': // to a value that was there before
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
	if err != nil || !json.Valid([]byte(text)) { // INF and NAN are not, nor is a text
		return errPHP
	}
	if text[0] != '-' && (text[0] < '0' || text[0] > '9') {
		return errPHP
	}
	return p.write(text)
}
