// Package idempotencyconnect lets a unary call of Connect that carries a key take effect
// once: the first one does the work, every repetition gets the same answer.
//
//	user := func(r *http.Request) (string, error) { return userOf(r.Context()), nil }
//	once, err := idempotencyconnect.New(store, user, nil, idempotency.MiddlewareConfig{})
//	path, handler := shopv1connect.NewShopHandler(shop, connect.WithInterceptors(authenticate, limits, once))
//
// The key is in the header Idempotency-Key, for the Connect, gRPC and gRPC-Web protocols
// alike, with any codec. The middleware of package idempotency decides: to it, and to the
// functions of its configuration, a call is a POST of /package.Service/Method with the
// header and the address of the client, and the context of the call. Two calls are the same
// call when procedure and message are: the message counts in its deterministic form.
//
// Codes, details, what is kept, and that records are shared with gRPC stand in package
// idempotencygrpc. Replays carry Idempotency-Replayed: true, failures in their metadata.
//
// A handler that is one transaction keeps its answer there: see [Record] and [Reply].
//
// Streams, and clients' calls, pass untouched.
package idempotencyconnect
