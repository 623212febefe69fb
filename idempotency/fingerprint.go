package idempotency

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash"
	"io"
	"mime"
	"net/http"
	"net/url"
	"strings"
)

// fingerprintVersion changes when the same request would get another sum.
const fingerprintVersion = 1

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
	h := newHash("parts", len(parts))
	for _, p := range parts {
		writePart(h, p)
	}
	return sum(h)
}

// Conflicts reports whether f and other surely belong to different requests.
func (f Fingerprint) Conflicts(other Fingerprint) bool {
	return f.Version == other.Version && f.Sum != other.Sum
}

// requestFingerprint covers method, path, query sorted by name, media type
// without parameters, the raw body, and what the user of the middleware adds.
func requestFingerprint(r *http.Request, body []byte, extra []string) Fingerprint {
	h := newHash("http", len(extra))
	writePart(h, r.Method)
	writePart(h, r.URL.EscapedPath())
	writePart(h, sortedQuery(r.URL.RawQuery))
	writePart(h, mediaType(r.Header.Get("Content-Type")))
	writeLength(h, len(body))
	h.Write(body)
	for _, p := range extra {
		writePart(h, p)
	}
	return sum(h)
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
	if header == "" {
		return ""
	}
	if t, _, err := mime.ParseMediaType(header); err == nil {
		return t
	}
	return strings.ToLower(header)
}

func newHash(kind string, parts int) hash.Hash {
	h := sha256.New()
	writePart(h, kind)
	writeLength(h, parts)
	return h
}

func writePart(h hash.Hash, s string) {
	writeLength(h, len(s))
	_, _ = io.WriteString(h, s)
}

func writeLength(h hash.Hash, n int) {
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], uint64(n))
	h.Write(b[:])
}

func sum(h hash.Hash) Fingerprint {
	return Fingerprint{Version: fingerprintVersion, Sum: hex.EncodeToString(h.Sum(nil))}
}
