package idempotencygrpc_test

import (
	"context"
	"os"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/modules/rpc/idempotencygrpc"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/shopv1"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/suite"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/suite/grpcserver"
)

func TestOnce(t *testing.T) {
	t.Parallel()
	suite.TestOnce(t, grpcserver.Start)
}

func TestTakeover(t *testing.T) {
	t.Parallel()
	suite.TestTakeover(t, grpcserver.Start)
}

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func TestTransaction(t *testing.T) {
	t.Parallel()
	suite.TestTransaction(t, grpcserver.Start, func(ctx context.Context, store *idempotencypgx.Store, place func(context.Context, pgx.Tx) (*shopv1.Order, error)) (*shopv1.Order, error) {
		work := func(ctx context.Context, tx pgx.Tx) (*shopv1.Order, error) {
			order, err := place(ctx, tx)
			return order, grpcserver.Error(err)
		}
		kept, err := store.Do(ctx, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			order, err := work(ctx, tx)
			return idempotencygrpc.Record(order, err)
		})
		return idempotencygrpc.Reply[*shopv1.Order](kept, err)
	})
}
