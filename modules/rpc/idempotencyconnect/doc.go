// Package idempotencyconnect lets a unary call of Connect with an idempotency key take effect
// once. Repeated calls get the same answer.
//
//	user := func(r *http.Request) (string, error) { return userOf(r.Context()), nil }
//	once, err := idempotencyconnect.New(store, user, nil, idempotency.MiddlewareConfig{})
//	path, handler := shopv1connect.NewShopHandler(shop, connect.WithInterceptors(authenticate, limits, once))
//
// The key is in the header Idempotency-Key, for the Connect, gRPC and gRPC-Web protocols,
// with any codec. The middleware of package idempotency decides. The middleware and the
// functions of its configuration see a call as a POST of /package.Service/Method, with the
// header, the client's address and the context of the call. Two calls are the same if
// procedure and message are equal. Messages are compared in their deterministic form.
//
// Package idempotencygrpc describes codes, details and stored answers. Records are shared
// with gRPC. Replays carry Idempotency-Replayed: true; a replayed error has it in its metadata.
//
// A handler that is one transaction stores its answer there: see [Record] and [Reply].
//
// Streams and the calls of clients pass unchanged.
package idempotencyconnect
