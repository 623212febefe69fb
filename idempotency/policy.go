package idempotency

import "net/http"

// Need says whether a request needs a key.
type Need int

const (
	// KeyRequired means that a request without a key is refused with 400.
	KeyRequired Need = iota
	// KeyOptional means that a request without a key passes untouched.
	KeyOptional
	// KeyIgnored means that every request passes untouched.
	KeyIgnored
)

// DefaultNeed requires a key of POST, PUT and PATCH, and ignores it elsewhere.
func DefaultNeed(r *http.Request) Need {
	switch r.Method {
	case http.MethodPost, http.MethodPut, http.MethodPatch:
		return KeyRequired
	}
	return KeyIgnored
}

// StoreDown says what becomes of a request when the store cannot be asked.
type StoreDown int

const (
	// FailClosed refuses with 503: nothing was done.
	FailClosed StoreDown = iota
	// FallBack asks MiddlewareConfig.Fallback, and refuses with 503 when that
	// fails, too.
	FallBack
	// FailOpen runs the handler without protection. The response carries
	// Idempotency-Bypassed: true and is not kept. A claim is in the context
	// (ClaimFrom) that nobody holds.
	FailOpen
)

// DefaultKeep keeps every status but 5xx and 401, 408, 425 and 429, which say
// that the request may succeed another time.
func DefaultKeep(status int) bool {
	switch status {
	case http.StatusUnauthorized, http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests:
		return false
	}
	return status < 500
}
