package ratelimit

import (
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/holdfast-go/holdfast/internal/problem"
)

// Errors of this package. Those that reach a client have the methods Code() string and
// HTTPStatus() int, and RetryAfter() time.Duration where waiting helps: ErrNoKey is 400
// RATE_LIMIT_KEY_REQUIRED, ErrUnavailable is 503 RATE_LIMIT_UNAVAILABLE, and what Decision.Err
// returns is 429 RATE_LIMITED.
var (
	// ErrInvalid is inside every error about limits and charges that make no sense. Nothing was
	// charged.
	ErrInvalid = errors.New("ratelimit: invalid charge")
	// ErrUnavailable says that the store could not be asked in time. The units may or may not have
	// been charged.
	ErrUnavailable error = &problem.Error{Text: "ratelimit: store unavailable", Problem: problem.Problem{
		Status: http.StatusServiceUnavailable, Code: "RATE_LIMIT_UNAVAILABLE",
		Detail: "The rate limit cannot be checked at the moment.", RetryAfter: time.Second,
	}}
	// ErrNoKey is returned by key functions for a request that does not say whom to charge. Such
	// requests are refused: they never share a quota.
	ErrNoKey error = &problem.Error{Text: "ratelimit: request has no key", Problem: problem.Problem{
		Status: http.StatusBadRequest, Code: "RATE_LIMIT_KEY_REQUIRED",
		Detail: "The request does not say whom to charge.",
	}}
	// ErrWaitTooLong says that the charges will not be allowed within the time that a Waiter has.
	ErrWaitTooLong = errors.New("ratelimit: wait too long")
	// ErrNever says that a cost is more than its limit can ever hold.
	ErrNever = errors.New("ratelimit: cost exceeds limit")

	errNilLimiter = errors.New("ratelimit: limiter is nil")
)

// Err returns nil if the decision allows, else an error with the code RATE_LIMITED, the status 429
// and the method RetryAfter() time.Duration. If Never, it is ErrNever and RetryAfter is 0.
func (d Decision) Err() error {
	if d.Allowed {
		return nil
	}
	return &deniedError{limit: d.Denied, wait: d.RetryAfter, never: d.Never}
}

// deniedError is a denial as an error.
type deniedError struct {
	limit string
	wait  time.Duration
	never bool
}

func (e *deniedError) Error() string {
	if e.never {
		return fmt.Sprintf("%v: limit %q", ErrNever, e.limit)
	}
	return fmt.Sprintf("ratelimit: denied by limit %q for %v", e.limit, e.wait)
}

func (e *deniedError) Code() string              { return "RATE_LIMITED" }
func (e *deniedError) HTTPStatus() int           { return http.StatusTooManyRequests }
func (e *deniedError) RetryAfter() time.Duration { return e.wait }

// Detail says what the client is told beside the title.
func (e *deniedError) Detail() string {
	if e.never {
		return "The request costs more than its limit allows at any time."
	}
	return ""
}

func (e *deniedError) Unwrap() error {
	if e.never {
		return ErrNever
	}
	return nil
}
