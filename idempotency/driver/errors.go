package driver

import (
	"errors"
	"net/http"
	"time"

	"github.com/holdfast-go/holdfast/internal/problem"
)

// CodeStoreUnavailable is the code of a request that came to nothing because its
// store failed.
const CodeStoreUnavailable = "IDEMPOTENCY_STORE_UNAVAILABLE"

var (
	// ErrKeyInvalid is idempotency.ErrKeyInvalid.
	ErrKeyInvalid error = &problem.Error{
		Text: "idempotency: key is invalid",
		Problem: problem.Problem{
			Status: http.StatusBadRequest, Code: "IDEMPOTENCY_KEY_INVALID",
			Detail: "The header Idempotency-Key must be there once, in the form that this service asks for.",
		},
	}
	// ErrForeignRecord is in the error of a Begin that found what it cannot read, such as a record of another
	// system. It may mean that the work was done, so the caller asks no fallback and runs nothing.
	ErrForeignRecord = errors.New("idempotency: the key has a record of another kind")
	// ErrLeaseLost is idempotency.ErrLeaseLost: the token does not hold the key.
	ErrLeaseLost error = &problem.Error{
		Text: "idempotency: lease lost",
		Problem: problem.Problem{
			Status: http.StatusServiceUnavailable, Code: CodeStoreUnavailable,
			Detail: "Try again with the same Idempotency-Key.", RetryAfter: time.Second,
		},
	}
)
