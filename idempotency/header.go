package idempotency

import (
	"net/http"
	"slices"
	"strings"
)

// defaultKeepHeaders are the headers that describe the body or point at what
// the request made.
var defaultKeepHeaders = []string{
	"Cache-Control", "Content-Disposition", "Content-Encoding", "Content-Language",
	"Content-Type", "Etag", "Last-Modified", "Link", "Location", "X-Content-Type-Options",
}

// deniedHeaders are never stored and never replayed, whoever allows them.
var deniedHeaders = map[string]bool{
	"Age": true, "Alt-Svc": true, "Authorization": true, "Connection": true,
	"Content-Length": true, "Date": true, "Idempotency-Key": true, ReplayedHeader: true, BypassedHeader: true,
	errorHeader:  true, // a handler cannot make its answer look like the error of a Do
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

// keepHeader returns the allowed part of h, which shares its values: h must not be
// changed any more. Names stay as they are spelled, and a name without a value
// stays: with both net/http sends something else than without.
func keepHeader(h http.Header, allowed []string) http.Header {
	kept := 0
	for name := range h {
		if contains(allowed, name) {
			kept++
		}
	}
	if kept == len(h) {
		return h
	}
	out := make(http.Header, kept)
	for name, values := range h {
		if contains(allowed, name) {
			out[name] = values
		}
	}
	return out
}

// contains looks for a name in a sorted list of canonical ones.
func contains(names []string, name string) bool {
	_, found := slices.BinarySearch(names, http.CanonicalHeaderKey(name))
	return found
}
