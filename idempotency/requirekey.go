package idempotency

import "net/http"

// RequireKey returns a middleware that refuses requests whose key is missing or
// malformed, as NewMiddleware does with the same Methods, Optional, ParseKey and
// Documentation of cfg, and asks no store. Put it before the rate limit: a client that sends no usable key is
// then told so without being charged.
func RequireKey(cfg MiddlewareConfig) func(http.Handler) http.Handler {
	cfg = cfg.withDefaults()
	keys := newKeyReader(cfg.ParseKey)
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if cfg.needsKey(r) {
				if _, err := keys.read(r.Header[Header]); err != nil {
					cfg.refuse(w, err)
					return
				}
			}
			next.ServeHTTP(w, r)
		})
	}
}
