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

// Problem is one error response. Its texts go to clients, so they must not contain internals.
type Problem struct {
	// Status is the HTTP status.
	Status int
	// Type is the URI of this kind of problem. Empty: about:blank.
	Type string
	// Code is the stable word for programs to compare, such as RATE_LIMITED.
	Code string
	// Title is one sentence for people. Empty: the standard text of the status.
	Title string
	// Detail describes how to deal with this occurrence. May be empty.
	Detail string
	// RetryAfter sets the Retry-After header, rounded up to whole seconds. Zero sets none.
	RetryAfter time.Duration
	// Extra holds further members.
	Extra map[string]any
}

// documentation is a page with a heading for each code.
const documentation = "https://github.com/holdfast-go/holdfast/blob/main/examples/guides/problems.md"

// Link returns the address of the heading for code in a document, as Markdown renderers build it.
func Link(document, code string) string { return document + "#" + strings.ToLower(code) }

// Document makes the type of a problem of this project link to another document. Empty: the type
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
	if err != nil { // only a value in Extra can fail to encode
		body = []byte(`{"type":"about:blank","code":` + strconv.Quote(p.Code) + `}`)
	}
	w.Header().Set("Content-Type", "application/problem+json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Del("Content-Length")
	w.WriteHeader(p.Status)
	_, _ = w.Write(append(body, '\n')) // the client may be gone: ignore the error
}

// RetryAfterSeconds returns d as the value of a Retry-After header: whole seconds, rounded up, so
// that a client which obeys is never too early.
func RetryAfterSeconds(d time.Duration) string {
	return strconv.FormatInt(int64((d+time.Second-1)/time.Second), 10)
}

// Error is an error that may reach a client: it has a code and an HTTP status.
// Packages export such errors as sentinels of type error.
type Error struct {
	// Text is the text for logs, which Error returns.
	Text string
	// Problem is the response to the client.
	Problem Problem
}

func (e *Error) Error() string { return e.Text }

// Code returns the stable word for programs to compare.
func (e *Error) Code() string { return e.Problem.Code }

// HTTPStatus returns the status of the response.
func (e *Error) HTTPStatus() int { return e.Problem.Status }

// RetryAfter returns how long the client should wait. 0: waiting does not help.
func (e *Error) RetryAfter() time.Duration { return e.Problem.RetryAfter }

// Detail returns how to deal with the error.
func (e *Error) Detail() string { return e.Problem.Detail }

// documented marks Error and types that embed it. The codes of other types are not in this
// project's documentation.
func (e *Error) documented() {}

// coded is an error with a code, ours or a user's.
type coded interface {
	error
	Code() string
	HTTPStatus() int
}

// Of returns the problem of the first error in err's tree that has the methods Code and HTTPStatus.
// It uses RetryAfter and Detail if they exist. For an [Error], and for types that embed one, the
// type links to the documentation. If no such error exists, or its status is not an error status,
// Of returns the problem of an internal error and false.
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
