package idempotency

import (
	"net/http"
	"slices"
)

// defaultKeepHeaders are the headers that describe the body or point at what
// the request made.
var defaultKeepHeaders = []string{
	"Cache-Control", "Content-Disposition", "Content-Encoding", "Content-Language",
	"Content-Type", "Etag", "Last-Modified", "Link", "Location", "X-Content-Type-Options",
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
