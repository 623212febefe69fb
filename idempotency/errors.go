package idempotency

import (
	"errors"
	"fmt"
	"time"
)

var (
	// ErrKeyInvalid says that a text is not an idempotency key.
	ErrKeyInvalid = errors.New("idempotency: key is not a UUID v4 in 32 lowercase hex digits, without hyphens")
	// ErrKeyReused says that the key was used before, for another request.
	ErrKeyReused = errors.New("idempotency: key was used for another request")
	// ErrResultUnavailable says that the work behind the key was done, but
	// that its result could not be kept. It is never done a second time.
	ErrResultUnavailable = errors.New("idempotency: the work was done, its result could not be kept")
	// ErrLeaseLost says that a claim is no longer held: its lease ran out, and
	// another run may have taken the key. It is also the cause of a handler's
	// cancelled context.
	ErrLeaseLost = errors.New("idempotency: lease lost")
	// ErrNotStored says that the work was done and its result is at hand, but
	// that the record of it could not be stored. The key stays taken until the
	// lease runs out; after that the same key runs the work again.
	ErrNotStored = errors.New("idempotency: result could not be stored")
	// ErrStoreUnavailable says that the store could not be asked, so that nothing
	// was done.
	ErrStoreUnavailable = errors.New("idempotency: store is unavailable")
	// ErrNoClaim says that a context carries no claim.
	ErrNoClaim = errors.New("idempotency: context carries no claim")
)

// InUseError says that the work behind the key is running now.
type InUseError struct {
	// RetryAfter is what is left of the lease of the running work.
	RetryAfter time.Duration
}

// Error names the time left.
func (e *InUseError) Error() string {
	return fmt.Sprintf("idempotency: key is in use for up to %s", e.RetryAfter)
}
