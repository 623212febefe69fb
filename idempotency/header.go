package idempotency

import (
	"net/http"
	"strings"
)

// defaultKeepHeaders are the headers that describe the body or point at what
// the request made.
var defaultKeepHeaders = []string{
	"Cache-Control", "Content-Disposition", "Content-Encoding", "Content-Language",
	"Content-Type", "Etag", "Last-Modified", "Link", "Location",
}

// deniedHeaders are never stored and never replayed, whoever allows them.
var deniedHeaders = map[string]bool{
	"Age": true, "Alt-Svc": true, "Authorization": true, "Connection": true,
	"Content-Length": true, "Date": true, "Idempotency-Key": true, ReplayedHeader: true, BypassedHeader: true,
	"Keep-Alive": true, "Proxy-Authenticate": true, "Proxy-Authorization": true,
	"Proxy-Connection": true, "Retry-After": true, "Server": true, "Set-Cookie": true,
	"Set-Cookie2": true, "Te": true, "Trailer": true, "Traceparent": true, "Tracestate": true,
	"Transfer-Encoding": true, "Upgrade": true, "Via": true, "Www-Authenticate": true,
}

// deniedPrefixes are the families of deniedHeaders.
var deniedPrefixes = []string{"Access-Control-", "Ratelimit", "X-Ratelimit", http.TrailerPrefix}

func denied(name string) bool {
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

// keepHeader returns the allowed part of h, which shares its values: h must not
// be changed any more.
func keepHeader(h http.Header, allowed []string) http.Header {
	kept := 0
	for _, name := range allowed {
		if len(h[name]) > 0 {
			kept++
		}
	}
	if kept == len(h) {
		return h
	}
	out := make(http.Header, kept)
	for _, name := range allowed {
		if values := h[name]; len(values) > 0 {
			out[name] = values
		}
	}
	return out
}
