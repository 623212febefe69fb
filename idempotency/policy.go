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

// defaultKeep keeps every status but 5xx and 401, 408, 425 and 429, which say
// that the request may succeed another time.
func defaultKeep(status int) bool {
	switch status {
	case http.StatusUnauthorized, http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests:
		return false
	}
	return status < 500
}
