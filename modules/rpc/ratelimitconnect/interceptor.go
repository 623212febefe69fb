package ratelimitconnect

import (
	"context"
	"fmt"
	"maps"
	"net/http"

	"connectrpc.com/connect"

	"github.com/holdfast-go/holdfast/modules/rpc/internal/connectform"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/limit"
	"github.com/holdfast-go/holdfast/ratelimit"
)

// New returns an interceptor that charges calls to a limiter. The arguments are as in
// ratelimit.NewMiddleware.
func New(l ratelimit.Limiter, charges func(*http.Request) ([]ratelimit.Charge, error), cfg ratelimit.MiddlewareConfig) (connect.Interceptor, error) {
	guard, err := limit.New(l, charges, cfg)
	if err != nil {
		return nil, fmt.Errorf("ratelimitconnect: %w", err)
	}
	return &interceptor{guard}, nil
}

type interceptor struct{ guard *limit.Guard }

// WrapUnary implements connect.Interceptor.
func (i *interceptor) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (resp connect.AnyResponse, err error) {
		if req.Spec().IsClient {
			return next(ctx, req)
		}
		about := connectform.About(req.Spec(), req.Peer(), req.Header())
		header, refused := i.guard.Do(ctx, about, func(ctx context.Context, _ http.Header) { resp, err = next(ctx, req) })
		connectform.Send(ctx, header, nil)
		if refused != nil {
			return nil, connectform.Error(refused)
		}
		return resp, err
	}
}

// WrapStreamingHandler implements connect.Interceptor. A stream is charged once, at its start.
func (i *interceptor) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) (err error) {
		about := connectform.About(conn.Spec(), conn.Peer(), conn.RequestHeader())
		header, refused := i.guard.Do(ctx, about, func(ctx context.Context, header http.Header) {
			maps.Copy(conn.ResponseHeader(), header)
			err = next(ctx, conn)
		})
		if refused != nil {
			maps.Copy(conn.ResponseHeader(), header)
			return connectform.Error(refused)
		}
		return err
	}
}

// WrapStreamingClient implements connect.Interceptor: a client is not limited.
func (i *interceptor) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}
