// Package sum computes the sums that compare requests with the same key.
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

// The algorithms for the body's sum. An algorithm gets a new number if it would give the same body another sum.
const (
	rawVersion       = 1
	canonicalVersion = 2
	multipartVersion = 3
)

// Half is the length of either half of a sum, in hex digits.
const Half = 2 * sumSize

// OfParts sums parts, each preceded by its length. The whole sum is always compared.
func OfParts(parts []string) (version int, digits string) {
	s := newSummer()
	s.begin("parts", len(parts))
	for _, p := range parts {
		s.text(p)
	}
	s.end(2 * Half)
	return rawVersion, s.done()
}

// OfRequest covers in its first half the method, the path, the query sorted by name, the media type without
// parameters, and extra. Its second half covers the body.
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

// path returns the path that the client requested, even if a router has stripped part of it.
func path(r *http.Request) string {
	target, _, _ := strings.Cut(r.RequestURI, "?")
	if _, after, found := strings.Cut(target, "://"); found && target[0] != '/' { // the absolute form
		_, after, _ = strings.Cut(after, "/")
		return "/" + after
	}
	if target == "" { // a request that did not come from a server
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

// summer computes the sums of a fingerprint, one after the other.
type summer struct {
	hash   hash.Hash
	buffer []byte // not yet hashed
	digits []byte // the sums so far
}

// flushAt is the number of bytes gathered before they are hashed.
const flushAt = 1024

var summers = sync.Pool{New: func() any { return &summer{hash: sha256.New()} }}

func newSummer() *summer {
	s := summers.Get().(*summer)
	s.digits = s.digits[:0]
	return s
}

// done returns the digits and returns the summer to the pool.
func (s *summer) done() string {
	digits := string(s.digits)
	if cap(s.buffer) <= 4*flushAt { // large buffers are not kept
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
	// maxDepth limits the recursion into a document.
	maxDepth = 1000
	// textEnd ends a text in the canonical form: no UTF-8 has this byte.
	textEnd = 0xff
)

// canonicalJSON returns the form shared by all spellings of a JSON document: white space, the order of members and
// escapes do not count. Numbers are compared as written, because some readers may treat 1 and 1.0 as different
// amounts.
//
// It returns false if the body must be compared byte by byte: if it is no JSON document, if two readers may parse it
// differently (a repeated name, half a surrogate pair), or if it is nested deeper than maxDepth.
//
// Time and memory are proportional to the body, because clients choose the document.
func canonicalJSON(body []byte) ([]byte, bool) {
	if !utf8.Valid(body) || !json.Valid(body) {
		return nil, false
	}
	c := canonizer{rest: body, out: make([]byte, 0, len(body))}
	ok := c.value(maxDepth)
	return c.out, ok
}

// canonizer walks over a valid document.
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

// member is a member of an object. The sum replaces the value, so that sorting moves no values.
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

// writeMembers returns false if a name is repeated.
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

// peek returns the next byte that is not white space.
func (c *canonizer) peek() byte {
	for strings.IndexByte(" \t\r\n", c.rest[0]) >= 0 {
		c.rest = c.rest[1:]
	}
	return c.rest[0]
}

func (c *canonizer) skip() { c.rest = c.rest[1:] }

// text returns the decoded string at the current position, and false for half a surrogate pair.
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

// escape returns the rune of the escape at the current position, or RuneError if there is none.
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

// isMultipart reports whether a media type has parts between boundaries, like the forms of browsers.
func isMultipart(media string) bool { return strings.HasPrefix(media, "multipart/") }

// parts returns the parts between the boundaries of a multipart body, because a client chooses a new boundary each
// time it sends a form. It returns false for a body that two readers may split differently.
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
