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

// Symfony's PhpSerializer, its default, puts message and stamps into the body, in PHP's own format, with
// slashes before quotes and, where it is not UTF-8, in base64.

const (
	envelopeClass = `Symfony\Component\Messenger\Envelope`
	// envelopeStart begins such a body, and envelopeStart64 one in base64.
	envelopeStart   = `O:36:\"Symfony\\Component\\Messenger\\Envelope\":`
	envelopeStart64 = "TzozNjpcIlN5bWZvbnlcXENvbXBvbmVudFxcTWVzc2VuZ2VyXFxFbnZlbG9wZVwi"
	// maxNesting bounds the nesting of values.
	maxNesting = 64
)

var errPHP = errors.New("not what Symfony's PhpSerializer writes")

// FromPHP reads the body of a message of Symfony's PhpSerializer: it returns what its other serializer has
// in headers, class and stamps, and the message's properties as JSON. False: the body is something else,
// or has what JSON has not, such as a reference.
func FromPHP(body []byte) (headers map[string]string, properties []byte, ok bool) {
	switch {
	case bytes.HasPrefix(body, []byte(envelopeStart)):
	case bytes.HasPrefix(body, []byte(envelopeStart64)):
		plain, err := base64.StdEncoding.DecodeString(string(body))
		if err != nil {
			return nil, nil, false
		}
		body = plain
	default:
		return nil, nil, false
	}
	p := php{in: unslash(body)}
	headers, properties, err := p.envelope()
	if err != nil || len(p.in) > 0 {
		return nil, nil, false
	}
	return headers, properties, true
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

// php reads serialized values and writes them as JSON.
type php struct {
	in    []byte // what is left
	out   bytes.Buffer
	depth int
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
		p.out.Reset()
		if name == "message" {
			if headers[HeaderType], err = p.message(); err != nil {
				return nil, nil, err
			}
			properties = bytes.Clone(p.out.Bytes())
			continue
		}
		if err := p.value(); err != nil {
			return nil, nil, err
		}
		var stamps map[string]json.RawMessage // an empty list where there are none
		if name == "stamps" && json.Unmarshal(p.out.Bytes(), &stamps) == nil {
			for class, of := range stamps {
				headers[StampPrefix+class] = string(of)
			}
		}
	}
	if properties == nil {
		return nil, nil, errPHP
	}
	return headers, properties, p.expect("}")
}

// message reads an object and returns its class.
func (p *php) message() (class string, err error) {
	class, n, err := p.object()
	if err != nil {
		return "", err
	}
	return class, p.properties(n)
}

// value reads one value.
func (p *php) value() error {
	if p.depth++; p.depth > maxNesting || len(p.in) < 2 {
		return errPHP
	}
	defer func() { p.depth-- }()
	switch p.in[0] {
	case 'N':
		p.out.WriteString("null")
		return p.expect("N;")
	case 'b':
		text, err := p.scalar("b:")
		if err != nil || text != "0" && text != "1" {
			return errPHP
		}
		p.out.WriteString(strconv.FormatBool(text == "1"))
		return nil
	case 'i', 'd':
		return p.number()
	case 's':
		text, err := p.text()
		if err != nil {
			return err
		}
		p.quote(text)
		return p.expect(";")
	case 'E': // an enumeration: class and case
		class, err := p.quoted("E:")
		if err != nil {
			return err
		}
		_, of, _ := strings.Cut(class, ":")
		p.quote(of)
		return p.expect(";")
	case 'O':
		_, err := p.message()
		return err
	case 'a':
		return p.array()
	}
	return errPHP
}

func (p *php) number() error {
	text, err := p.scalar(string(p.in[:1]) + ":")
	if err != nil || !json.Valid([]byte(text)) { // INF and NAN are not, nor is a text
		return errPHP
	}
	if text[0] != '-' && (text[0] < '0' || text[0] > '9') {
		return errPHP
	}
	p.out.WriteString(text)
	return nil
}

// array reads a list, whose keys count from 0, or a map.
func (p *php) array() error {
	if err := p.expect("a:"); err != nil {
		return err
	}
	n, err := p.count()
	if err != nil {
		return err
	}
	if err := p.expect(":{"); err != nil {
		return err
	}
	if n == 0 || bytes.HasPrefix(p.in, []byte("i:0;")) {
		return p.list(n)
	}
	return p.properties(n)
}

// list reads values whose keys count from 0. Where that ends it is a map after all.
func (p *php) list(n int) error {
	open := p.out.Len()
	var starts []int // of the values
	p.out.WriteByte('[')
	for i := range n {
		if !bytes.HasPrefix(p.in, []byte("i:"+strconv.Itoa(i)+";")) {
			p.giveKeys(open, starts)
			return p.rest(i, n)
		}
		if _, err := p.scalar("i:"); err != nil {
			return err
		}
		if i > 0 {
			p.out.WriteByte(',')
		}
		starts = append(starts, p.out.Len())
		if err := p.value(); err != nil {
			return err
		}
	}
	p.out.WriteByte(']')
	return p.expect("}")
}

// giveKeys makes the beginning of a map of that of a list.
func (p *php) giveKeys(open int, starts []int) {
	values := bytes.Clone(p.out.Bytes()[open:])
	p.out.Truncate(open)
	p.out.WriteByte('{')
	for i, start := range starts {
		end := len(values)
		if i+1 < len(starts) {
			end = starts[i+1] - 1 - open // before the comma
		}
		if i > 0 {
			p.out.WriteByte(',')
		}
		p.quote(strconv.Itoa(i))
		p.out.WriteByte(':')
		p.out.Write(values[start-open : end])
	}
}

// properties reads names with values up to the closing brace.
func (p *php) properties(n int) error {
	p.out.WriteByte('{')
	return p.rest(0, n)
}

// rest reads the properties from the i-th on.
func (p *php) rest(i, n int) error {
	for ; i < n; i++ {
		name, err := p.property()
		if err != nil {
			return err
		}
		if i > 0 {
			p.out.WriteByte(',')
		}
		p.quote(name)
		p.out.WriteByte(':')
		if err := p.value(); err != nil {
			return err
		}
	}
	p.out.WriteByte('}')
	return p.expect("}")
}

// object reads the beginning of an object, as far as its properties.
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

// property reads a name: of a property without what tells who may see it, or a key.
func (p *php) property() (string, error) {
	if bytes.HasPrefix(p.in, []byte("i:")) {
		return p.scalar("i:")
	}
	name, err := p.text()
	if err != nil {
		return "", err
	}
	return name[strings.LastIndexByte(name, 0)+1:], p.expect(";")
}

func (p *php) text() (string, error) { return p.quoted("s:") }

// quoted reads a length and so many bytes in quotation marks.
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
	if n > len(p.in) || !utf8.Valid(p.in[:n]) {
		return "", errPHP
	}
	text := string(p.in[:n])
	p.in = p.in[n:]
	return text, p.expect(`"`)
}

// count reads a length, which is never more than what is left.
func (p *php) count() (int, error) {
	digits := 0
	for digits < len(p.in) && p.in[digits] >= '0' && p.in[digits] <= '9' {
		digits++
	}
	n, err := strconv.Atoi(string(p.in[:digits]))
	if err != nil || n > len(p.in) {
		return 0, errPHP
	}
	p.in = p.in[digits:]
	return n, nil
}

// scalar reads what is between a kind and the semicolon.
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

func (p *php) quote(text string) {
	quoted, _ := json.Marshal(text) // a string can always be encoded
	p.out.Write(quoted)
}
