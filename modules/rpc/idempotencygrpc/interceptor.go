package idempotencygrpc

import (
	"context"
	"fmt"
	"net/http"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/answer"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/exchange"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/grpcform"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/once"
)

// Interceptor lets each key reach a handler once. It is safe for concurrent use.
type Interceptor struct{ guard *once.Guard }

// New returns an Interceptor. scope and cfg are as in idempotency.NewMiddleware. Methods and
// CanonicalJSON of cfg must be zero, and MaxRequestBytes is the server's own limit by default.
// needs reports whether calls of a procedure (/package.Service/Method) need a key; others pass
// unchanged. If needs is nil, all procedures need one except those whose idempotency_level is
// NO_SIDE_EFFECTS. gRPC's own services (/grpc.…), such as health and reflection, never need one.
// For procedures whose clients may send no key, chain a second one with Optional.
func New(store driver.Store, scope func(*http.Request) (string, error), needs func(procedure string) bool, cfg idempotency.MiddlewareConfig) (*Interceptor, error) {
	guard, err := once.New(store, scope, needs, cfg)
	if err != nil {
		return nil, fmt.Errorf("idempotencygrpc: %w", err)
	}
	return &Interceptor{guard}, nil
}

// Unary is a grpc.UnaryServerInterceptor. Put authentication and rate limits before it.
func (i *Interceptor) Unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if !i.guard.Needs(info.FullMethod) {
		return handler(ctx, req)
	}
	message, ok := req.(proto.Message)
	if !ok {
		return nil, status.Errorf(codes.Internal, "idempotencygrpc: a %T is no protobuf message", req)
	}
	var resp any
	var failure error
	seen := &observed{ServerTransportStream: grpc.ServerTransportStreamFromContext(ctx)}
	a, fresh := i.guard.Do(ctx, grpcform.About(ctx, info.FullMethod), message, func(ctx context.Context) once.Answer {
		if seen.ServerTransportStream != nil {
			ctx = grpc.NewContextWithServerTransportStream(ctx, seen)
		}
		resp, failure = handler(ctx, req)
		return seen.answer(resp, failure)
	})
	if fresh {
		seen.pass()
	}
	send(ctx, a)
	switch {
	case a.Status != nil:
		return nil, keep(failure, a, fresh)
	case fresh:
		return resp, nil
	}
	return a.Message, nil
}

// keep returns the handler's own error if the client gets that error.
func keep(failure error, a once.Answer, fresh bool) error {
	if own, ok := status.FromError(failure); fresh && ok && own.Code() == codes.Code(a.Status.GetCode()) {
		return failure
	}
	return status.FromProto(a.Status).Err()
}

// send adds metadata to the answer. Without a transport, as in a test, it does nothing.
func send(ctx context.Context, a once.Answer) {
	if len(a.Header) > 0 {
		_ = grpc.SetHeader(ctx, grpcform.Metadata(a.Header))
	}
	if len(a.Trailer) > 0 {
		_ = grpc.SetTrailer(ctx, grpcform.Metadata(a.Trailer))
	}
}

// observed holds a handler's metadata until its answer is known to be the one that counts.
type observed struct {
	grpc.ServerTransportStream
	mu              sync.Mutex
	sent            bool
	header, trailer metadata.MD
}

// SetHeader implements grpc.ServerTransportStream.
func (o *observed) SetHeader(md metadata.MD) error { return o.add(md, false) }

// SendHeader implements grpc.ServerTransportStream. The header is sent with the answer, after
// the answer is stored.
func (o *observed) SendHeader(md metadata.MD) error { return o.add(md, true) }

func (o *observed) add(md metadata.MD, last bool) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.sent {
		return status.Error(codes.Internal, "idempotencygrpc: header was already sent")
	}
	o.header, o.sent = metadata.Join(o.header, md), last
	return nil
}

// SetTrailer implements grpc.ServerTransportStream.
func (o *observed) SetTrailer(md metadata.MD) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.trailer = metadata.Join(o.trailer, md)
	return nil
}

// pass adds the handler's metadata to the answer.
func (o *observed) pass() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.header) > 0 {
		_ = o.ServerTransportStream.SetHeader(o.header)
	}
	if len(o.trailer) > 0 {
		_ = o.ServerTransportStream.SetTrailer(o.trailer)
	}
}

func (o *observed) answer(resp any, failure error) once.Answer {
	o.mu.Lock()
	defer o.mu.Unlock()
	a := once.Answer{Header: grpcform.Header(o.header), Trailer: grpcform.Header(o.trailer)}
	if failure != nil {
		a.Status = grpcform.StatusOf(failure)
		return a
	}
	a.Message, _ = resp.(proto.Message) // anything else cannot be stored
	return a
}

// Record returns the answer of a handler in its stored form, for work that is one
// transaction (the method Do of idempotencypgx.Store):
//
//	kept, err := store.Do(ctx, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
//		return idempotencygrpc.Record(place(ctx, tx, req))
//	})
//	return idempotencygrpc.Reply[*shop.Order](kept, err)
//
// A status error with a final code becomes a Response, which commits with the transaction.
// Every other error is returned as it is, and rolls back.
func Record(m proto.Message, err error) (idempotency.Response, error) {
	if err == nil {
		return answer.OfMessage(m)
	}
	s, ok := status.FromError(err)
	if !ok || exchange.HTTPStatus(int32(s.Code())) >= http.StatusInternalServerError {
		return idempotency.Response{}, err
	}
	return answer.OfStatus(s.Proto())
}

// Reply returns the answer of a handler: the message or the status error that Record has
// stored, or err.
func Reply[M proto.Message](kept idempotency.Response, err error) (M, error) {
	var none M
	if err != nil {
		return none, err
	}
	m, ok := none.ProtoReflect().New().Interface().(M)
	if !ok {
		return none, fmt.Errorf("idempotencygrpc: %T is not the type of a message", none)
	}
	failed, err := answer.Into(kept, m)
	switch {
	case err != nil:
		return none, fmt.Errorf("idempotencygrpc: %w", err)
	case failed != nil:
		return none, status.FromProto(failed).Err()
	}
	return m, nil
}
