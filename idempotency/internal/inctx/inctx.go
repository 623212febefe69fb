// Package inctx has the key under which a context carries the holder of a claim. The
// core looks it up by itself, which spares a context in each request.
package inctx

// Holder is the key.
type Holder struct{}
