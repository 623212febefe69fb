package idempotency

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
)

const (
	// ReplayedHeader is set to "true" on an answer that is not the first one.
	ReplayedHeader = "Idempotency-Replayed"
	// BypassedHeader is set to "true" on an answer that was made without
	// protection, see FailOpen.
	BypassedHeader = "Idempotency-Bypassed"
)

// Response is the kept result of one piece of work: what a repeated request is
// answered with.
type Response struct {
	// Status is the HTTP status, 200 to 999. 0 makes the response a
	// tombstone: the work was done, its result is not there.
	Status int
	// Header holds the kept headers; nil is none.
	Header http.Header
	// Body is the kept body; nil is empty.
	Body []byte
}

// JSON makes a response with v encoded as JSON.
func JSON(status int, v any) (Response, error) {
	body, err := json.Marshal(v)
	if err != nil {
		return Response{}, fmt.Errorf("idempotency: encode response: %w", err)
	}
	return Response{
		Status: status,
		Header: http.Header{"Content-Type": {"application/json"}},
		Body:   body,
	}, nil
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

// Send writes r to w. It must not be called on a tombstone.
func (r Response) Send(w http.ResponseWriter) {
	header := w.Header()
	for name, values := range r.Header {
		if !denied(name) {
			header[name] = slices.Clone(values)
		}
	}
	if bodyAllowed(r.Status) {
		header.Set("Content-Length", strconv.Itoa(len(r.Body)))
	}
	w.WriteHeader(r.Status)
	if bodyAllowed(r.Status) {
		_, _ = w.Write(r.Body) // a client that went away asks again
	}
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
		if !denied(name) {
			out[name] = slices.Clone(values)
		}
	}
	return out
}

// bodyAllowed follows RFC 9110: no content with 1xx, 204 and 304.
func bodyAllowed(status int) bool {
	return status >= 200 && status != http.StatusNoContent && status != http.StatusNotModified
}
