package ratelimitgrpc

import (
	"context"
	"fmt"
	"net/http"

	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"github.com/holdfast-go/holdfast/modules/rpc/internal/grpcform"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/limit"
	"github.com/holdfast-go/holdfast/ratelimit"
)

// Interceptor charges calls to a limiter. It is safe for concurrent use.
type Interceptor struct{ guard *limit.Guard }

// New returns an Interceptor. The arguments are as in ratelimit.NewMiddleware.
func New(l ratelimit.Limiter, charges func(*http.Request) ([]ratelimit.Charge, error), cfg ratelimit.MiddlewareConfig) (*Interceptor, error) {
	guard, err := limit.New(l, charges, cfg)
	if err != nil {
		return nil, fmt.Errorf("ratelimitgrpc: %w", err)
	}
	return &Interceptor{guard}, nil
}

// Unary is a grpc.UnaryServerInterceptor. Put authentication before it, and idempotency
// behind it.
func (i *Interceptor) Unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
	header, refused := i.guard.Do(ctx, grpcform.About(ctx, info.FullMethod), func(ctx context.Context, _ http.Header) {
		resp, err = handler(ctx, req)
	})
	send(ctx, header)
	if refused != nil {
		return nil, failure(refused)
	}
	return resp, err
}

// Stream is a grpc.StreamServerInterceptor. A stream is charged once, at its start.
func (i *Interceptor) Stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) (err error) {
	ctx := ss.Context()
	header, refused := i.guard.Do(ctx, grpcform.About(ctx, info.FullMethod), func(ctx context.Context, header http.Header) {
		if len(header) > 0 {
			_ = ss.SetHeader(grpcform.Metadata(header)) // it has not been sent yet
		}
		err = handler(srv, &stream{ss, ctx})
	})
	if refused != nil {
		_ = ss.SetHeader(grpcform.Metadata(header))
		return failure(refused)
	}
	return err
}

// stream is a stream with the context that allows refunds.
type stream struct {
	grpc.ServerStream
	ctx context.Context
}

// Context implements grpc.ServerStream.
func (s *stream) Context() context.Context { return s.ctx }

func failure(s *spb.Status) error { return status.FromProto(s).Err() }

// send adds metadata to an answer, unless the handler has sent its header already.
func send(ctx context.Context, header http.Header) {
	if len(header) > 0 {
		_ = grpc.SetHeader(ctx, grpcform.Metadata(header))
	}
}
