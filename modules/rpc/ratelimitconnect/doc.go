// Package ratelimitconnect puts a limiter of package ratelimit in front of Connect handlers:
// unary calls, and streams at their start.
//
//	limits, err := ratelimitconnect.New(limiter, charges, ratelimit.MiddlewareConfig{})
//	path, handler := shopv1connect.NewShopHandler(shop, connect.WithInterceptors(authenticate, limits, once))
//
// The middleware of package ratelimit decides. It and charges see a call as a POST of
// /package.Service/Method, with the header, the client's address and the context of the
// call. A call without charges passes, and calls of grpc.health.v1.Health always pass: a probe
// has nobody to charge. The calls of clients pass unchanged.
//
// Package ratelimitgrpc describes the codes and details of errors. Answers to calls with a
// decision have RateLimit-Policy and RateLimit in their header. ratelimit.RefundFrom refunds the
// units of a call: call it in OnReplay of idempotencyconnect.
package ratelimitconnect
