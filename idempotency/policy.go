package idempotency

import "net/http"

// needsKey reports whether the request has to have a usable key.
func (c *MiddlewareConfig) needsKey(r *http.Request) bool {
	for _, method := range c.Methods {
		if method == r.Method {
			return !c.Optional || len(r.Header[Header]) > 0
		}
	}
	return false
}

// clientClosedRequest is what nginx, and handlers after it, call a request whose client has gone.
const clientClosedRequest = 499

// defaultKeep keeps every status but 5xx and 401, 408, 425, 429 and 499, which say
// that the request may succeed another time.
func defaultKeep(status int) bool {
	switch status {
	case http.StatusUnauthorized, http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests, clientClosedRequest:
		return false
	}
	return status < 500
}
