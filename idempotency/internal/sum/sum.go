// Package sum makes the sums by which requests with one key are compared.
package sum

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"hash"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode/utf16"
	"unicode/utf8"
)

// The ways to make the body's sum. One changes its number when the same body would
// get another sum.
const (
	rawVersion       = 1
	canonicalVersion = 2
	multipartVersion = 3
)

// Half is the length of either half of a sum, in hex digits.
const Half = 2 * sumSize

// OfParts sums parts, each with its length before it. All of it is always compared.
func OfParts(parts []string) (version int, digits string) {
	s := newSummer()
	s.begin("parts", len(parts))
	for _, p := range parts {
		s.text(p)
	}
	s.end(2 * Half)
	return rawVersion, s.done()
}

// OfRequest covers in its first half method, path, query sorted by name,
// media type without parameters and what the user of the middleware adds; in its
// second half the body.
func OfRequest(r *http.Request, body []byte, extra []string, canonical bool) (version int, digits string) {
	media := mediaType(r.Header.Get("Content-Type"))
	s := newSummer()
	s.begin("http", len(extra))
	s.text(r.Method)
	s.text(path(r))
	s.text(sortedQuery(r.URL.RawQuery))
	s.text(media)
	for _, p := range extra {
		s.text(p)
	}
	s.end(Half)

	version, kind := rawVersion, "raw"
	if canonical {
		version = canonicalVersion
	}
	all := [][]byte{body}
	switch {
	case isMultipart(media):
		version = multipartVersion
		if found, ok := parts(r.Header.Get("Content-Type"), body); ok {
			kind, all = "multipart", found
		}
	case canonical && isJSON(media):
		if doc, ok := canonicalJSON(body); ok {
			kind, all = "json", [][]byte{doc}
		}
	}
	s.begin(kind, len(all))
	for _, part := range all {
		s.bytes(part)
	}
	s.end(Half)
	return version, s.done()
}

// path is the one that the client asked for, whatever a router has stripped off
// it since.
func path(r *http.Request) string {
	target, _, _ := strings.Cut(r.RequestURI, "?")
	if _, after, found := strings.Cut(target, "://"); found && target[0] != '/' { // the absolute form
		_, after, _ = strings.Cut(after, "/")
		return "/" + after
	}
	if target == "" { // a request made by hand
		return r.URL.EscapedPath()
	}
	return target
}

func sortedQuery(raw string) string {
	if raw == "" {
		return ""
	}
	values, err := url.ParseQuery(raw)
	if err != nil {
		return raw
	}
	return values.Encode()
}

func mediaType(header string) string {
	if strings.IndexByte(header, ';') >= 0 {
		if t, _, err := mime.ParseMediaType(header); err == nil {
			return t
		}
	}
	return strings.ToLower(strings.TrimSpace(header))
}

func isJSON(media string) bool {
	return media == "application/json" || strings.HasSuffix(media, "+json")
}

// summer makes the sums of a fingerprint, one after the other.
type summer struct {
	hash   hash.Hash
	buffer []byte // what is not hashed yet
	digits []byte // of the sums so far
}

// flushAt is how much is gathered before it is hashed.
const flushAt = 1024

var summers = sync.Pool{New: func() any { return &summer{hash: sha256.New()} }}

func newSummer() *summer {
	s := summers.Get().(*summer)
	s.digits = s.digits[:0]
	return s
}

// done ends the use of the summer.
func (s *summer) done() string {
	digits := string(s.digits)
	if cap(s.buffer) <= 4*flushAt { // a long text is not held on to
		summers.Put(s)
	}
	return digits
}

func (s *summer) begin(kind string, parts int) {
	s.hash.Reset()
	s.buffer = s.buffer[:0]
	s.text(kind)
	s.number(parts)
}

// end adds the first hex digits of the sum.
func (s *summer) end(digits int) {
	s.flush()
	s.buffer = s.hash.Sum(s.buffer)
	s.digits = hex.AppendEncode(s.digits, s.buffer[:digits/2])
}

func (s *summer) number(n int) {
	if len(s.buffer) > flushAt {
		s.flush()
	}
	s.buffer = binary.BigEndian.AppendUint64(s.buffer, uint64(n))
}

func (s *summer) text(p string) {
	s.number(len(p))
	s.buffer = append(s.buffer, p...)
}

func (s *summer) bytes(p []byte) {
	s.number(len(p))
	s.flush()
	s.hash.Write(p)
}

func (s *summer) flush() {
	s.hash.Write(s.buffer)
	s.buffer = s.buffer[:0]
}

const (
	// maxDepth bounds the recursion over a document.
	maxDepth = 1000
	// textEnd ends a text in the canonical form: no UTF-8 has this byte.
	textEnd = 0xff
)

// canonicalJSON returns the form that a JSON document shares with every other spelling of it:
// white space, the order of members and escapes do not count. A number counts as it is written,
// because 1 and 1.0 may be different amounts to somebody.
//
// It returns false for what counts as raw bytes: what is no JSON document, what two readers may
// understand differently (a name that is there twice, half a surrogate pair), and what is nested
// deeper than maxDepth.
//
// Time and memory are proportional to the body: it is the client who chooses the document.
func canonicalJSON(body []byte) ([]byte, bool) {
	if !utf8.Valid(body) || !json.Valid(body) {
		return nil, false
	}
	c := canonizer{rest: body, out: make([]byte, 0, len(body))}
	ok := c.value(maxDepth)
	return c.out, ok
}

// canonizer walks over a document that is valid.
type canonizer struct {
	rest []byte
	out  []byte
}

func (c *canonizer) value(depth int) bool {
	if depth == 0 {
		return false
	}
	switch c.peek() {
	case '{':
		return c.object(depth)
	case '[':
		return c.array(depth)
	case '"':
		text, ok := c.text()
		c.write('"', text)
		return ok
	}
	end := bytes.IndexAny(c.rest, ",]} \t\r\n")
	if end < 0 {
		end = len(c.rest)
	}
	c.write('0', c.rest[:end]) // a number, true, false or null
	c.rest = c.rest[end:]
	return true
}

func (c *canonizer) array(depth int) bool {
	c.out = append(c.out, '[')
	c.skip()
	for c.peek() != ']' {
		if c.rest[0] == ',' {
			c.skip()
		}
		if !c.value(depth - 1) {
			return false
		}
	}
	c.skip()
	c.out = append(c.out, ']')
	return true
}

// member is one of an object. The sum stands for the value, so that sorting moves no values.
type member struct {
	name []byte
	sum  [sumSize]byte
}

const sumSize = 16 // 128 bits of a SHA-256

func (c *canonizer) object(depth int) bool {
	var members []member
	c.skip()
	for c.peek() != '}' {
		if c.rest[0] == ',' {
			c.skip()
			c.peek()
		}
		name, ok := c.text()
		c.peek()
		c.skip() // the colon
		start := len(c.out)
		if !ok || !c.value(depth-1) {
			return false
		}
		sum := sha256.Sum256(c.out[start:])
		members = append(members, member{name, [sumSize]byte(sum[:])})
		c.out = c.out[:start]
	}
	c.skip()
	return c.writeMembers(members)
}

// writeMembers returns false if a name is there twice.
func (c *canonizer) writeMembers(members []member) bool {
	slices.SortFunc(members, func(a, b member) int { return bytes.Compare(a.name, b.name) })
	c.out = append(c.out, '{')
	for i := range members {
		if i > 0 && bytes.Equal(members[i].name, members[i-1].name) {
			return false
		}
		c.write('"', members[i].name)
		c.out = append(c.out, members[i].sum[:]...)
	}
	c.out = append(c.out, '}')
	return true
}

func (c *canonizer) write(kind byte, text []byte) {
	c.out = append(c.out, kind)
	c.out = append(c.out, text...)
	c.out = append(c.out, textEnd)
}

// peek returns the next byte that is no white space.
func (c *canonizer) peek() byte {
	for strings.IndexByte(" \t\r\n", c.rest[0]) >= 0 {
		c.rest = c.rest[1:]
	}
	return c.rest[0]
}

func (c *canonizer) skip() { c.rest = c.rest[1:] }

// text returns what the string at hand stands for, and false for half a surrogate pair.
func (c *canonizer) text() (text []byte, ok bool) {
	c.skip()
	end := bytes.IndexAny(c.rest, `"\`)
	if c.rest[end] == '"' {
		text, c.rest = c.rest[:end], c.rest[end+1:]
		return text, true
	}
	for ok = true; c.rest[0] != '"'; {
		if c.rest[0] != '\\' {
			text = append(text, c.rest[0])
			c.skip()
			continue
		}
		r := c.escape()
		if utf16.IsSurrogate(r) {
			r = utf16.DecodeRune(r, c.escape())
			ok = ok && r != utf8.RuneError
		}
		text = utf8.AppendRune(text, r)
	}
	c.skip()
	return text, ok
}

// escape returns the rune of the escape at hand, and RuneError if there is none.
func (c *canonizer) escape() rune {
	if c.rest[0] != '\\' {
		return utf8.RuneError
	}
	kind := c.rest[1]
	if i := strings.IndexByte(`"\/bfnrt`, kind); i >= 0 {
		c.rest = c.rest[2:]
		return rune("\"\\/\b\f\n\r\t"[i])
	}
	n, _ := strconv.ParseUint(string(c.rest[2:6]), 16, 16) // the document is valid
	c.rest = c.rest[6:]
	return rune(n)
}

// isMultipart reports whether a media type has parts between boundaries, as the forms of browsers have.
func isMultipart(media string) bool { return strings.HasPrefix(media, "multipart/") }

// parts returns what is between the boundaries of a multipart body: a client chooses a new boundary each time it
// sends the same form. It returns false for a body that two readers may divide differently.
func parts(contentType string, body []byte) ([][]byte, bool) {
	_, params, err := mime.ParseMediaType(contentType)
	if err != nil || params["boundary"] == "" {
		return nil, false
	}
	boundary := []byte("--" + params["boundary"])
	body, found := bytes.CutPrefix(body, boundary)
	if !found {
		return nil, false
	}
	all := bytes.Split(body, append([]byte("\r\n"), boundary...))
	for _, part := range all {
		if !bytes.HasPrefix(part, []byte("\r\n")) && !bytes.HasPrefix(part, []byte("--")) {
			return nil, false
		}
	}
	return all, true
}
