package headers

import (
	"net/http"
	"strings"
)

// deniedHeaders are never stored and never replayed, whoever allows them.
var deniedHeaders = map[string]bool{
	"Age": true, "Alt-Svc": true, "Authorization": true, "Connection": true,
	"Content-Length": true, "Date": true, "Idempotency-Key": true,
	"Idempotency-Replayed": true, "Idempotency-Bypassed": true,
	"Keep-Alive": true, "Proxy-Authenticate": true, "Proxy-Authorization": true,
	"Proxy-Connection": true, "Retry-After": true, "Server": true, "Set-Cookie": true,
	"Set-Cookie2": true, "Te": true, "Trailer": true, "Traceparent": true, "Tracestate": true,
	"Transfer-Encoding": true, "Upgrade": true, "Via": true, "Www-Authenticate": true,
}

// deniedPrefixes are the families of deniedHeaders.
var deniedPrefixes = []string{"Access-Control-", "Ratelimit", "X-Ratelimit", http.TrailerPrefix}

// Denied reports whether a header must never be given to a later caller.
func Denied(name string) bool {
	name = http.CanonicalHeaderKey(name)
	if deniedHeaders[name] {
		return true
	}
	for _, p := range deniedPrefixes {
		if strings.HasPrefix(name, p) {
			return true
		}
	}
	return false
}
