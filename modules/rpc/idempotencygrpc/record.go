package idempotencygrpc

import (
	"fmt"
	"net/http"

	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/answer"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/exchange"
)

// Record returns the answer of a handler in the form in which it is kept, for work that is
// one transaction (the method Do of idempotencypgx.Store):
//
//	kept, err := store.Do(ctx, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
//		return idempotencygrpc.Record(place(ctx, tx, req))
//	})
//	return idempotencygrpc.Reply[*shop.Order](kept, err)
//
// A status error whose code is final becomes a Response, which is committed with what the
// transaction did. Every other error is returned as it is, and rolls back.
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

// Reply returns what a handler answers with: the message or the status error that Record has
// kept, or err.
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
