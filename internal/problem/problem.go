// Package problem writes error responses as RFC 9457 problem details.
package problem

import (
	"encoding/json"
	"maps"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Problem is one error response. The text goes to clients: no internals.
type Problem struct {
	// Status is the HTTP status.
	Status int
	// Type is the URI that names this kind of problem. Empty: about:blank.
	Type string
	// Code is the stable word that programs compare, such as RATE_LIMITED.
	Code string
	// Title is one sentence for people. Empty means the status's own text.
	Title string
	// Detail says what to do about this occurrence. May be empty.
	Detail string
	// RetryAfter sets the header of that name, rounded up to whole seconds.
	// Zero sets none.
	RetryAfter time.Duration
	// Extra holds further members.
	Extra map[string]any
}

// documentation has a heading for each code.
const documentation = "https://github.com/holdfast-go/holdfast/blob/main/examples/guides/problems.md"

// Link returns the place in a document whose heading is the code, as Markdown renderers
// write it.
func Link(document, code string) string { return document + "#" + strings.ToLower(code) }

// Document has the type of a problem of this project be in another document. Empty: it
// stays.
func (p *Problem) Document(document string) {
	if document != "" && strings.HasPrefix(p.Type, documentation) {
		p.Type = Link(document, p.Code)
	}
}

// Write sends p as application/problem+json.
func Write(w http.ResponseWriter, p Problem) {
	if p.RetryAfter > 0 {
		w.Header().Set("Retry-After", RetryAfterSeconds(p.RetryAfter))
	}
	members := map[string]any{"type": "about:blank", "status": p.Status, "title": p.Title, "code": p.Code}
	if p.Type != "" {
		members["type"] = p.Type
	}
	if p.Title == "" {
		members["title"] = http.StatusText(p.Status)
	}
	if p.Detail != "" {
		members["detail"] = p.Detail
	}
	maps.Copy(members, p.Extra)
	body, err := json.Marshal(members)
	if err != nil { // only Extra can hold what JSON cannot
		body = []byte(`{"type":"about:blank","code":` + strconv.Quote(p.Code) + `}`)
	}
	w.Header().Set("Content-Type", "application/problem+json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Del("Content-Length")
	w.WriteHeader(p.Status)
	_, _ = w.Write(append(body, '\n')) // the client may be gone; there is nobody to tell
}

// RetryAfterSeconds returns d as the value of a Retry-After header: whole
// seconds, rounded up, so that a client which obeys is never too early.
func RetryAfterSeconds(d time.Duration) string {
	return strconv.FormatInt(int64((d+time.Second-1)/time.Second), 10)
}
