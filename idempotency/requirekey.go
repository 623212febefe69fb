package idempotency

import (
	"net/http"

	"github.com/holdfast-go/holdfast/internal/problem"
)

// RequireKey returns a middleware that refuses requests whose key is missing or
// malformed, as NewMiddleware does, and asks no store. Put it before the rate
// limit: a client that sends no usable key is then told so without being charged.
// need is MiddlewareConfig.Need; nil: DefaultNeed.
func RequireKey(need func(r *http.Request) Need) func(http.Handler) http.Handler {
	if need == nil {
		need = DefaultNeed
	}
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if needed(need, r) {
				if _, err := keyFrom(r.Header); err != nil {
					problem.Write(w, problemOf(err))
					return
				}
			}
			next.ServeHTTP(w, r)
		})
	}
}

// needed reports whether the request has to have a usable key.
func needed(need func(r *http.Request) Need, r *http.Request) bool {
	switch need(r) {
	case KeyIgnored:
		return false
	case KeyOptional:
		return len(r.Header[Header]) > 0
	}
	return true
}
