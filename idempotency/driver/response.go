package driver

import (
	"net/http"
	"slices"

	"github.com/holdfast-go/holdfast/idempotency/internal/headers"
)

// Response is the kept result of one piece of work: what a repeated request is
// answered with. It is the same struct as idempotency.Response.
type Response struct {
	// Status is the HTTP status, 200 to 999. 0 makes the response a
	// tombstone: the work was done, its result is not there.
	Status int
	// Header holds the kept headers; nil is none.
	Header http.Header
	// Body is the kept body; nil is empty.
	Body []byte
}

// Unavailable reports whether r is a tombstone. A status that is no answer (an
// informational one, or none that HTTP knows) makes one too.
func (r Response) Unavailable() bool { return r.Status < 200 || r.Status > 999 }

// Size is the number of bytes that r takes, headers and body.
func (r Response) Size() int {
	n := len(r.Body)
	for name, values := range r.Header {
		n += len(name)
		for _, v := range values {
			n += len(v)
		}
	}
	return n
}

// Clone returns a copy that shares nothing with r.
func (r Response) Clone() Response {
	return Response{Status: r.Status, Header: r.Header.Clone(), Body: slices.Clone(r.Body)}
}

// CleanHeader returns a copy of h without the headers that must never be given
// to a later caller: cookies, credentials, and what belongs to one connection,
// one moment or one client (Date, Connection, CORS, rate limits …).
func CleanHeader(h http.Header) http.Header {
	out := make(http.Header, len(h))
	for name, values := range h {
		if !headers.Denied(name) {
			out[name] = slices.Clone(values)
		}
	}
	return out
}
