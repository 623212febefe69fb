// Package inctx has the keys of the context values that the middleware sets for a request. The core looks up Holder
// itself, which saves a context for each request.
package inctx

import "context"

// Holder is the key of the holder of a claim.
type Holder struct{}

// PassedKey is the key of a *Passed.
type PassedKey struct{}

// Passed means that the middleware has passed a request without a claim. It has the middleware's settings for the
// request.
type Passed struct {
	MaxRequestBytes int64
	Keep            func(status int) bool
	Documentation   string
}

// Documentation returns the middleware's page that problems link to; empty: this project's page.
func Documentation(ctx context.Context) string {
	if holder, ok := ctx.Value(Holder{}).(interface{ Documentation() string }); ok {
		return holder.Documentation()
	}
	if passed, ok := ctx.Value(PassedKey{}).(*Passed); ok {
		return passed.Documentation
	}
	return ""
}
