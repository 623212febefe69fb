package idempotencyconnect_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/rpc/idempotencyconnect"
	"github.com/holdfast-go/holdfast/rpc/internal/shopv1"
	"github.com/holdfast-go/holdfast/rpc/internal/suite"
	"github.com/holdfast-go/holdfast/rpc/internal/suite/connectserver"
	"github.com/holdfast-go/holdfast/rpc/internal/suite/grpcserver"
)

func TestTransaction(t *testing.T) {
	t.Parallel()
	suite.TestTransaction(t, connectserver.Start(), func(ctx context.Context, store *idempotencypgx.Store, work func(context.Context, pgx.Tx) (*shopv1.Order, error)) (*shopv1.Order, error) {
		kept, err := store.Do(ctx, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			order, err := work(ctx, tx)
			return idempotencyconnect.Record(order, connectserver.Error(err, nil))
		})
		resp, err := idempotencyconnect.Reply[shopv1.Order](kept, err)
		if err != nil {
			return nil, err
		}
		return resp.Msg, nil
	})
}

// A key that came by one protocol is replayed by the other.
func TestAcrossProtocols(t *testing.T) {
	t.Parallel()
	suite.TestAcross(t, [2]suite.Protocol{grpcserver.Start, connectserver.Start()}, idempotencytest.NewStore())
}
