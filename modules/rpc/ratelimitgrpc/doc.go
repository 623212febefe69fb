// Package ratelimitgrpc puts a limiter of package ratelimit in front of gRPC handlers: unary
// calls, and streams at their start.
//
//	limits, err := ratelimitgrpc.New(limiter, charges, ratelimit.MiddlewareConfig{})
//	server := grpc.NewServer(grpc.ChainUnaryInterceptor(authenticate, limits.Unary, once.Unary),
//		grpc.ChainStreamInterceptor(limits.Stream))
//
// The middleware of package ratelimit decides. It and charges see a call as its HTTP request on
// the wire: POST, the path /package.Service/Method, the metadata as header, the peer's address,
// and the context of the call. So ratelimit.HeaderKey and ratelimit.ClientIP serve both. A call
// without charges passes, and calls of grpc.health.v1.Health always pass: a probe has nobody to
// charge.
//
// # Errors
//
//	RESOURCE_EXHAUSTED  RATE_LIMITED             RetryInfo, and QuotaFailure with the limits
//	UNAVAILABLE         RATE_LIMIT_UNAVAILABLE   the limiter is unavailable; RetryInfo
//	INVALID_ARGUMENT    RATE_LIMIT_KEY_REQUIRED  the call has no key to charge
//	INTERNAL            INTERNAL                 charges failed; the log has the reason
//
// The word is the reason of an ErrorInfo of the domain github.com/holdfast-go/holdfast. Answers to
// calls with a decision have ratelimit-policy and ratelimit in their header metadata. A limit that
// can never be met has no RetryInfo.
//
// ratelimit.RefundFrom refunds the units of a call: call it in OnReplay of idempotencygrpc.
package ratelimitgrpc
