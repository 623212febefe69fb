// Package inctx has the keys under which a context carries what the middleware says of a
// request. The core looks Holder up by itself, which spares a context in each request.
package inctx

import "context"

// Holder is the key of the holder of a claim.
type Holder struct{}

// PassedKey is the key of a *Passed.
type PassedKey struct{}

// Passed says that the middleware has let a request pass without a claim, and has the
// middleware's settings for it.
type Passed struct {
	MaxRequestBytes int64
	Keep            func(status int) bool
	Documentation   string
}

// Documentation returns what the middleware says of the document that problems link to;
// empty: that of this project.
func Documentation(ctx context.Context) string {
	if holder, ok := ctx.Value(Holder{}).(interface{ Documentation() string }); ok {
		return holder.Documentation()
	}
	if passed, ok := ctx.Value(PassedKey{}).(*Passed); ok {
		return passed.Documentation
	}
	return ""
}
