// Package sum makes the sums by which requests with one key are compared.
package sum

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash"
	"mime"
	"net/http"
	"net/url"
	"strings"
	"sync"
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
