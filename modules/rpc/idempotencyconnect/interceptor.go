package idempotencyconnect

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/answer"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/connectform"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/exchange"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/once"
)

// New returns an interceptor that lets each key reach a handler once. scope and cfg are as in
// idempotency.NewMiddleware. Methods and CanonicalJSON of cfg must be zero, and
// MaxRequestBytes is the handler's own limit by default. needs reports whether calls of a
// procedure (/package.Service/Method) need a key; others pass unchanged. If needs is nil, all
// procedures need one except those whose idempotency_level is NO_SIDE_EFFECTS. gRPC's own
// services (/grpc.…), such as health and reflection, never need one. For procedures whose
// clients may send no key, add a second interceptor with Optional.
func New(store driver.Store, scope func(*http.Request) (string, error), needs func(procedure string) bool, cfg idempotency.MiddlewareConfig) (connect.Interceptor, error) {
	guard, err := once.New(store, scope, needs, cfg)
	if err != nil {
		return nil, fmt.Errorf("idempotencyconnect: %w", err)
	}
	return &interceptor{guard: guard, bySpec: needs == nil}, nil
}

type interceptor struct {
	guard  *once.Guard
	bySpec bool // the specs of handlers decide which procedures have no side effects
}

// WrapUnary implements connect.Interceptor.
func (i *interceptor) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		if req.Spec().IsClient || !i.needs(req.Spec()) {
			return next(ctx, req)
		}
		message, ok := req.Any().(proto.Message)
		if !ok {
			return nil, connect.NewError(connect.CodeInternal, fmt.Errorf("idempotencyconnect: a %T is no protobuf message", req.Any()))
		}
		var resp connect.AnyResponse
		var failure error
		about := connectform.About(req.Spec(), req.Peer(), req.Header())
		a, fresh := i.guard.Do(ctx, about, message, func(ctx context.Context) once.Answer {
			resp, failure = next(ctx, req)
			return answerOf(ctx, resp, failure)
		})
		connectform.Send(ctx, a.Header, a.Trailer)
		switch {
		case a.Status != nil:
			return nil, keep(failure, a, fresh)
		case fresh:
			return resp, nil
		}
		return replay(a.Message), nil
	}
}

func (i *interceptor) needs(spec connect.Spec) bool {
	return i.guard.Needs(spec.Procedure) && !(i.bySpec && spec.IdempotencyLevel == connect.IdempotencyNoSideEffects)
}

func answerOf(ctx context.Context, resp connect.AnyResponse, failure error) (a once.Answer) {
	a.Header, a.Trailer = connectform.Sent(ctx, resp, failure)
	if failure != nil {
		a.Status = connectform.StatusOf(failure)
		return a
	}
	a.Message, _ = resp.Any().(proto.Message) // anything else cannot be stored
	return a
}

// keep returns the handler's own error if the client gets that error.
func keep(failure error, a once.Answer, fresh bool) error {
	if own, ok := errors.AsType[*connect.Error](failure); fresh && ok && own.Code() == connect.Code(a.Status.GetCode()) {
		return failure
	}
	return connectform.Error(a.Status)
}

// replay returns a stored message. Its type is only known at run time, so it is a dynamic
// message, which every codec for protobuf accepts.
func replay(kept proto.Message) connect.AnyResponse {
	m := dynamicpb.NewMessage(kept.ProtoReflect().Descriptor())
	proto.Merge(m, kept)
	return connect.NewResponse(m)
}

// WrapStreamingHandler implements connect.Interceptor.
func (i *interceptor) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

// WrapStreamingClient implements connect.Interceptor.
func (i *interceptor) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

// Record returns the answer of a handler in its stored form, for work that is one
// transaction (the method Do of idempotencypgx.Store):
//
//	kept, err := store.Do(ctx, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
//		return idempotencyconnect.Record(place(ctx, tx, req.Msg))
//	})
//	return idempotencyconnect.Reply[shop.Order](kept, err)
//
// A *connect.Error with a final code becomes a Response, which commits with the transaction.
// Every other error is returned as it is, and rolls back.
func Record(m proto.Message, err error) (idempotency.Response, error) {
	if err == nil {
		return answer.OfMessage(m)
	}
	own, ok := errors.AsType[*connect.Error](err)
	if !ok || exchange.HTTPStatus(int32(own.Code())) >= http.StatusInternalServerError {
		return idempotency.Response{}, err
	}
	return answer.OfStatus(connectform.StatusOf(err))
}

// Reply returns the answer of a handler: the message or the *connect.Error that Record has
// stored, or err.
func Reply[M any](kept idempotency.Response, err error) (*connect.Response[M], error) {
	if err != nil {
		return nil, err
	}
	resp := connect.NewResponse(new(M))
	m, ok := resp.Any().(proto.Message)
	if !ok {
		return nil, fmt.Errorf("idempotencyconnect: %T is no protobuf message", resp.Any())
	}
	failed, err := answer.Into(kept, m)
	switch {
	case err != nil:
		return nil, fmt.Errorf("idempotencyconnect: %w", err)
	case failed != nil:
		return nil, connectform.Error(failed)
	}
	return resp, nil
}
