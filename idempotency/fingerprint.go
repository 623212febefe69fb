package idempotency

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

// The ways to make a sum. One changes its number when the same request would get
// another sum.
const (
	rawVersion       = 1
	canonicalVersion = 2
)

// Fingerprint tells whether two requests with one key are the same request.
// The zero value fits every request: it is what a record has that was written
// by a system without fingerprints.
type Fingerprint struct {
	// Version names the way the sum was made. Sums of different versions say
	// nothing about each other, so that an upgrade refuses no running key.
	Version int
	// Sum is the SHA-256 in hex.
	Sum string
}

// FingerprintOf hashes parts (SHA-256 over length-prefixed parts), for work
// that does not come over HTTP.
func FingerprintOf(parts ...string) Fingerprint {
	s := newSum("parts", len(parts))
	for _, p := range parts {
		s.text(p)
	}
	return s.fingerprint(rawVersion)
}

// Conflicts reports whether f and other surely belong to different requests.
func (f Fingerprint) Conflicts(other Fingerprint) bool {
	return f.Version == other.Version && f.Sum != other.Sum
}

// requestFingerprint covers method, path, query sorted by name, media type
// without parameters, the body, and what the user of the middleware adds.
func requestFingerprint(r *http.Request, body []byte, extra []string, canonical bool) Fingerprint {
	media := mediaType(r.Header.Get("Content-Type"))
	version, kind := rawVersion, "http"
	if canonical {
		version = canonicalVersion
	}
	if canonical && isJSON(media) {
		if doc, ok := canonicalJSON(body); ok {
			kind, body = "http json", doc
		}
	}
	s := newSum(kind, len(extra))
	s.text(r.Method)
	s.text(path(r))
	s.text(sortedQuery(r.URL.RawQuery))
	s.text(media)
	s.bytes(body)
	for _, p := range extra {
		s.text(p)
	}
	return s.fingerprint(version)
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

// summer makes one sum after the other.
type summer struct {
	hash   hash.Hash
	buffer []byte // what is not hashed yet
}

// flushAt is how much is gathered before it is hashed.
const flushAt = 1024

var summers = sync.Pool{New: func() any { return &summer{hash: sha256.New()} }}

func newSum(kind string, parts int) *summer {
	s := summers.Get().(*summer)
	s.hash.Reset()
	s.buffer = s.buffer[:0]
	s.text(kind)
	s.number(parts)
	return s
}

// fingerprint ends the sum.
func (s *summer) fingerprint(version int) Fingerprint {
	s.flush()
	s.buffer = s.hash.Sum(s.buffer)
	s.buffer = hex.AppendEncode(s.buffer, s.buffer)
	fp := Fingerprint{Version: version, Sum: string(s.buffer[sha256.Size:])}
	if cap(s.buffer) <= 4*flushAt { // a long text is not held on to
		summers.Put(s)
	}
	return fp
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
