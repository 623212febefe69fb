package driver

import (
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
		Text: "idempotency: key is not a UUID v4 in 32 lowercase hex digits, without hyphens",
		Problem: problem.Problem{
			Status: http.StatusBadRequest, Code: "IDEMPOTENCY_KEY_INVALID",
			Detail: "The header Idempotency-Key must be there once: " +
				"a UUID v4 in lowercase and without hyphens, such as a0eebc999c0b4ef8bb6d6bb9bd380a11.",
		},
	}
	// ErrLeaseLost is idempotency.ErrLeaseLost: the token does not hold the key.
	ErrLeaseLost error = &problem.Error{
		Text: "idempotency: lease lost",
		Problem: problem.Problem{
			Status: http.StatusServiceUnavailable, Code: CodeStoreUnavailable,
			Detail: "Try again with the same Idempotency-Key.", RetryAfter: time.Second,
		},
	}
)
