package problem

import (
	"errors"
	"net/http"
	"time"
)

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
