package idempotencyconnect

import (
	"errors"
	"fmt"
	"net/http"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/answer"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/connectform"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/exchange"
)

// Record returns the answer of a handler in the form in which it is kept, for work that is
// one transaction (the method Do of idempotencypgx.Store):
//
//	kept, err := store.Do(ctx, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
//		return idempotencyconnect.Record(place(ctx, tx, req.Msg))
//	})
//	return idempotencyconnect.Reply[shop.Order](kept, err)
//
// A *connect.Error whose code is final becomes a Response, which is committed with what the
// transaction did. Every other error is returned as it is, and rolls back.
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

// Reply returns what a handler answers with: the message or the *connect.Error that Record
// has kept, or err.
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
