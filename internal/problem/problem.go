// Package problem writes error responses as RFC 9457 problem details.
package problem

import (
	"encoding/json"
	"errors"
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

// Error is an error that may reach a client: it has a code and an HTTP status.
// Packages export such errors as sentinels of type error.
type Error struct {
	// Text is what Error returns; it is for logs.
	Text string
	// Problem is what the client is told.
	Problem Problem
}

// Error returns the text.
func (e *Error) Error() string { return e.Text }

// Code is the stable word that programs compare.
func (e *Error) Code() string { return e.Problem.Code }

// HTTPStatus is the status of the answer.
func (e *Error) HTTPStatus() int { return e.Problem.Status }

// RetryAfter is how long the client should wait. 0: waiting does not help.
func (e *Error) RetryAfter() time.Duration { return e.Problem.RetryAfter }

// Detail says what to do.
func (e *Error) Detail() string { return e.Problem.Detail }

// documented is met by Error alone, and by what embeds it: the codes of others are not in
// the documentation of this project.
func (e *Error) documented() {}

// coded is an error with a code: ours, or one of a user.
type coded interface {
	error
	Code() string
	HTTPStatus() int
}

// Of returns the problem of the first error in err's tree that has the methods Code
// and HTTPStatus; RetryAfter and Detail count if it has them. Of an [Error], and of what embeds
// one, the type links to its documentation. false: there is none, or
// its status is not one of an error, and the problem is that of an internal error.
func Of(err error) (Problem, bool) {
	known, ok := errors.AsType[coded](err)
	if !ok || known.HTTPStatus() < 400 || known.HTTPStatus() > 599 {
		return Problem{Status: http.StatusInternalServerError, Code: "INTERNAL"}, false
	}
	p := Problem{Status: known.HTTPStatus(), Code: known.Code()}
	if waits, ok := known.(interface{ RetryAfter() time.Duration }); ok {
		p.RetryAfter = waits.RetryAfter()
	}
	if _, ours := known.(interface{ documented() }); ours {
		p.Type = Link(documentation, p.Code)
	}
	if told, ok := known.(interface{ Detail() string }); ok {
		p.Detail = told.Detail()
	}
	return p, true
}
