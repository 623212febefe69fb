package idempotency

import (
	"errors"
	"net/http"
	"time"

	"github.com/holdfast-go/holdfast/internal/problem"
)

// The codes of the middleware's own answers.
const (
	CodeKeyRequired       = "IDEMPOTENCY_KEY_REQUIRED"
	CodeKeyInvalid        = "IDEMPOTENCY_KEY_INVALID"
	CodeKeyInUse          = "IDEMPOTENCY_KEY_IN_USE"
	CodeKeyReused         = "IDEMPOTENCY_KEY_REUSED"
	CodeResultUnavailable = "IDEMPOTENCY_RESULT_UNAVAILABLE"
	CodeStoreUnavailable  = "IDEMPOTENCY_STORE_UNAVAILABLE"
	CodeRequestTooLarge   = "REQUEST_TOO_LARGE"
	CodeInvalidRequest    = "INVALID_REQUEST"
	CodeInternal          = "INTERNAL"
)

// aKey says what a key is to those who have sent none.
const aKey = "a UUID v4 in lowercase and without hyphens, such as a0eebc999c0b4ef8bb6d6bb9bd380a11."

var (
	errKeyRequired    = errors.New("idempotency: no key")
	errBodyTooLarge   = errors.New("idempotency: request body is too large")
	errBodyUnreadable = errors.New("idempotency: request body is unreadable")
	errScope          = errors.New("idempotency: no scope")
)

func problemOf(err error) problem.Problem {
	if inUse, ok := errors.AsType[*InUseError](err); ok {
		return problem.Problem{
			Status: http.StatusConflict, Code: CodeKeyInUse,
			Detail:     "A request with this Idempotency-Key is being processed. Try again for its answer.",
			RetryAfter: max(inUse.RetryAfter, time.Millisecond), // even a lease that is just ending
		}
	}
	switch {
	case errors.Is(err, errKeyRequired):
		return problem.Problem{
			Status: http.StatusBadRequest, Code: CodeKeyRequired,
			Detail: "This request needs the header Idempotency-Key: " + aKey,
		}
	case errors.Is(err, ErrKeyInvalid):
		return problem.Problem{
			Status: http.StatusBadRequest, Code: CodeKeyInvalid,
			Detail: "The header Idempotency-Key must be there once: " + aKey,
		}
	case errors.Is(err, ErrKeyReused):
		return problem.Problem{
			Status: http.StatusUnprocessableEntity, Code: CodeKeyReused,
			Detail: "This Idempotency-Key was used for another request. Use a new key.",
		}
	case errors.Is(err, ErrResultUnavailable):
		return problem.Problem{
			Status: http.StatusConflict, Code: CodeResultUnavailable,
			Detail: "The request with this Idempotency-Key was carried out, but its response was not kept.",
		}
	case errors.Is(err, ErrStoreUnavailable):
		return problem.Problem{
			Status: http.StatusServiceUnavailable, Code: CodeStoreUnavailable,
			Detail: "Nothing was done. Try again with the same Idempotency-Key.", RetryAfter: time.Second,
		}
	case errors.Is(err, errBodyTooLarge):
		return problem.Problem{Status: http.StatusRequestEntityTooLarge, Code: CodeRequestTooLarge}
	case errors.Is(err, errBodyUnreadable):
		return problem.Problem{
			Status: http.StatusBadRequest, Code: CodeInvalidRequest,
			Detail: "The request body could not be read.",
		}
	}
	return problem.Problem{Status: http.StatusInternalServerError, Code: CodeInternal}
}
