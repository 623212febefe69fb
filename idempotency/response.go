package idempotency

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"

	"github.com/holdfast-go/holdfast/idempotency/internal/headers"
)

const (
	// ReplayedHeader is set to "true" on an answer that is not the first one.
	ReplayedHeader = "Idempotency-Replayed"
	// bypassedHeader is set to "true" on an answer that was made without
	// protection, see MiddlewareConfig.FailOpen.
	bypassedHeader = "Idempotency-Bypassed"
)

// Response is the kept result of one piece of work: what a repeated request is
// answered with.
type Response struct {
	// Status is the HTTP status, 200 to 999.
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

// Send writes r to w, without the headers that are never given to a later caller.
func (r Response) Send(w http.ResponseWriter) {
	header := w.Header()
	for name, values := range r.Header {
		if !headers.Denied(name) {
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

// bodyAllowed follows RFC 9110: no content with 1xx, 204 and 304.
func bodyAllowed(status int) bool {
	return status >= 200 && status != http.StatusNoContent && status != http.StatusNotModified
}
