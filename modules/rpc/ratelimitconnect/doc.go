// Package ratelimitconnect puts a limiter of package ratelimit in front of Connect handlers:
// unary calls, and streams at their start.
//
//	limits, err := ratelimitconnect.New(limiter, charges, ratelimit.MiddlewareConfig{})
//	path, handler := shopv1connect.NewShopHandler(shop, connect.WithInterceptors(authenticate, limits, once))
//
// The middleware of package ratelimit decides: to it and to charges a call is a POST of
// /package.Service/Method with the header and the address of the client, and the context of
// the call. No charges let a call pass, and
// calls of grpc.health.v1.Health always pass: a probe has nobody to charge. Clients' calls pass untouched.
//
// Errors carry the code, the ErrorInfo and the other details that package ratelimitgrpc
// names; calls that were decided carry RateLimit-Policy and RateLimit in their header.
// ratelimit.RefundFrom gives the units of a call back: idempotencyconnect calls it by
// OnReplay.
package ratelimitconnect
