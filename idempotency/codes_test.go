package idempotency_test

import (
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
)

// Errors that reach a client carry their code and HTTP status.
func TestCodes(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		err    error
		code   string
		status int
		waits  bool
	}{
		{idempotency.ErrKeyInvalid, "IDEMPOTENCY_KEY_INVALID", http.StatusBadRequest, false},
		{idempotency.ErrKeyInUse, "IDEMPOTENCY_KEY_IN_USE", http.StatusConflict, true},
		{idempotency.ErrKeyReused, "IDEMPOTENCY_KEY_REUSED", http.StatusUnprocessableEntity, false},
		{idempotency.ErrResultUnavailable, "IDEMPOTENCY_RESULT_UNAVAILABLE", http.StatusConflict, false},
		{idempotency.ErrStoreUnavailable, "IDEMPOTENCY_STORE_UNAVAILABLE", http.StatusServiceUnavailable, true},
		{idempotency.ErrLeaseLost, "IDEMPOTENCY_STORE_UNAVAILABLE", http.StatusServiceUnavailable, true},
		{idempotencypgx.ErrNotCommitted, "NOT_COMMITTED", http.StatusServiceUnavailable, true},
	} {
		err := fmt.Errorf("wrapped: %w", tt.err)
		coded, ok := errors.AsType[interface {
			error
			Code() string
			HTTPStatus() int
			RetryAfter() time.Duration
		}](err)
		if !ok || coded.Code() != tt.code || coded.HTTPStatus() != tt.status || (coded.RetryAfter() > 0) != tt.waits {
			t.Errorf("%v: want %d %s, and to wait is %v", tt.err, tt.status, tt.code, tt.waits)
		}
		if !errors.Is(err, tt.err) {
			t.Errorf("%v is not itself", tt.err)
		}
	}
	for _, err := range []error{idempotency.ErrNotStored, idempotency.ErrNoClaim} { // no client sees them
		if _, ok := errors.AsType[interface {
			error
			Code() string
		}](err); ok {
			t.Errorf("%v has a code", err)
		}
	}
}
