package idempotency

import (
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/internal/problem"
)

// Errors that reach clients have the methods Code and HTTPStatus, and RetryAfter if waiting helps.
var (
	// ErrKeyInvalid means that a text is not an idempotency key: 400 IDEMPOTENCY_KEY_INVALID.
	ErrKeyInvalid = driver.ErrKeyInvalid
	// ErrKeyInUse means that another request with the key is running: 409 IDEMPOTENCY_KEY_IN_USE. RetryAfter is the
	// rest of that request's lease.
	ErrKeyInUse error = keyInUse
	// ErrKeyReused means that the key was used for a different request: 422 IDEMPOTENCY_KEY_REUSED.
	ErrKeyReused error = &problem.Error{
		Text: "idempotency: key was used for another request",
		Problem: problem.Problem{
			Status: http.StatusUnprocessableEntity, Code: "IDEMPOTENCY_KEY_REUSED",
			Detail: "This Idempotency-Key was used for another request. Use a new key.",
		},
	}
	// ErrResultUnavailable means that the work of the key was done, but its result could not be kept. The work is
	// never done again: 409 IDEMPOTENCY_RESULT_UNAVAILABLE.
	ErrResultUnavailable error = &problem.Error{
		Text: "idempotency: the work was done, but its result could not be kept",
		Problem: problem.Problem{
			Status: http.StatusConflict, Code: "IDEMPOTENCY_RESULT_UNAVAILABLE",
			Detail: "The request with this Idempotency-Key was carried out, but its response was not kept.",
		},
	}
	// ErrStoreUnavailable means that the store was unreachable, so nothing was done: 503
	// IDEMPOTENCY_STORE_UNAVAILABLE.
	ErrStoreUnavailable error = &problem.Error{
		Text: "idempotency: store is unavailable",
		Problem: problem.Problem{
			Status: http.StatusServiceUnavailable, Code: driver.CodeStoreUnavailable,
			Detail: "Nothing was done. Try again with the same Idempotency-Key.", RetryAfter: time.Second,
		},
	}
	// ErrLeaseLost means that a claim is no longer held: its lease ran out, and another run may have taken the key.
	// It is also the cause of a handler's cancelled context. 503 IDEMPOTENCY_STORE_UNAVAILABLE.
	ErrLeaseLost = driver.ErrLeaseLost
	// ErrNotStored means that the work was done and its result is returned, but the record could not be stored. The
	// key stays taken until the lease runs out; after that the same key runs the work again.
	ErrNotStored = errors.New("idempotency: result could not be stored")
	// ErrNoClaim means that a context carries no claim.
	ErrNoClaim = errors.New("idempotency: context carries no claim")
)

var keyInUse = &problem.Error{
	Text: "idempotency: key is in use",
	Problem: problem.Problem{
		Status: http.StatusConflict, Code: "IDEMPOTENCY_KEY_IN_USE",
		Detail:     "A request with this Idempotency-Key is being processed. Try again for its answer.",
		RetryAfter: time.Second,
	},
}

// coded is an error with a code.
type coded = problem.Error

// inUseError is ErrKeyInUse with the rest of the lease.
type inUseError struct {
	*coded
	left time.Duration
}

func (e *inUseError) Error() string {
	return fmt.Sprintf("%s for up to %s", e.Text, e.left)
}

// RetryAfter is the rest of the lease; at least 1 ms, so that it is never zero.
func (e *inUseError) RetryAfter() time.Duration { return max(e.left, time.Millisecond) }

func (e *inUseError) Is(target error) bool { return target == ErrKeyInUse }

// Errors of the middleware that callers of this package never see.
var (
	errBodyTooLarge error = &problem.Error{
		Text:    "idempotency: request body is too large",
		Problem: problem.Problem{Status: http.StatusRequestEntityTooLarge, Code: "REQUEST_TOO_LARGE"},
	}
	errBodyUnreadable error = &problem.Error{
		Text: "idempotency: request body is unreadable",
		Problem: problem.Problem{
			Status: http.StatusBadRequest, Code: "INVALID_REQUEST",
			Detail: "The request body could not be read.",
		},
	}
	errScope = errors.New("idempotency: no scope")
)

// refuse answers a rejected request with the problem of err.
func (c *MiddlewareConfig) refuse(w http.ResponseWriter, err error) {
	p, _ := problem.Of(err)
	if errors.Is(err, ErrStoreUnavailable) { // the store's own error may have another code
		p, _ = problem.Of(ErrStoreUnavailable)
	}
	p.Document(c.Documentation)
	problem.Write(w, p)
}

// refusal returns the error for a request with fingerprint fp whose key another request has taken. It is nil if the
// work must be done, or its result can be replayed.
func refusal(out driver.BeginResult, fp driver.Fingerprint) error {
	switch {
	case out.State == driver.Acquired:
		return nil
	case fp.Conflicts(out.Fingerprint):
		return ErrKeyReused
	case out.State == driver.InProgress:
		return &inUseError{keyInUse, out.Lease}
	case out.Response.Unavailable():
		return ErrResultUnavailable
	}
	return nil
}
