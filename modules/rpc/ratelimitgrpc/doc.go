// Package ratelimitgrpc puts a limiter of package ratelimit in front of gRPC handlers: unary
// calls, and streams at their start.
//
//	limits, err := ratelimitgrpc.New(limiter, charges, ratelimit.MiddlewareConfig{})
//	server := grpc.NewServer(grpc.ChainUnaryInterceptor(authenticate, limits.Unary, once.Unary),
//		grpc.ChainStreamInterceptor(limits.Stream))
//
// The middleware of package ratelimit decides: to it and to charges a call is the HTTP
// request that it is on the wire (POST, the path /package.Service/Method, the metadata as
// header, the address of the peer, and the context of the call), so ratelimit.HeaderKey and
// ratelimit.ClientIP serve both. No charges let a call pass, and
// calls of grpc.health.v1.Health always pass: a probe has nobody to charge.
//
// # What a client gets
//
//	RESOURCE_EXHAUSTED  RATE_LIMITED             RetryInfo, and QuotaFailure with the limits
//	UNAVAILABLE         RATE_LIMIT_UNAVAILABLE   the limits could not be asked; RetryInfo
//	INVALID_ARGUMENT    RATE_LIMIT_KEY_REQUIRED  the call does not say whom to charge
//	INTERNAL            INTERNAL                 charges failed; the log says why
//
// The words are the reason of an ErrorInfo of the domain github.com/holdfast-go/holdfast. Calls
// that were decided carry ratelimit-policy and ratelimit in their header metadata. A limit that
// can never be met has no RetryInfo.
//
// ratelimit.RefundFrom gives the units of a call back: idempotencygrpc calls it by OnReplay.
package ratelimitgrpc
