package idempotencymcp_test

import (
	"context"
	"os"
	"runtime/debug"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/modules/rpc/idempotencymcp"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/shopv1"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/suite"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/suite/grpcserver"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/suite/mcpserver"
)

// The SDK allocates about 500 KB per call, so a rarer collection saves a third of the CPU time.
func TestMain(m *testing.M) {
	debug.SetGCPercent(400)
	os.Exit(testenv.Run(m))
}

func TestOnce(t *testing.T) {
	t.Parallel()
	for name, typed := range map[string]bool{"typed handlers": true, "raw handlers": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			suite.TestOnce(t, mcpserver.Start(typed))
		})
	}
}

func TestTakeover(t *testing.T) {
	t.Parallel()
	suite.TestTakeover(t, mcpserver.Start(true))
}

func TestTransaction(t *testing.T) {
	t.Parallel()
	suite.TestTransaction(t, mcpserver.Start(true), func(ctx context.Context, store *idempotencypgx.Store, work func(context.Context, pgx.Tx) (*shopv1.Order, error)) (*shopv1.Order, error) {
		place := func(ctx context.Context, tx pgx.Tx) (*mcp.CallToolResult, error) {
			order, err := work(ctx, tx)
			if err != nil {
				return nil, grpcserver.Error(err)
			}
			return mcpserver.Result(order)
		}
		result, err := idempotencymcp.Reply(store.Do(ctx, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			return idempotencymcp.Record(place(ctx, tx))
		}))
		if err != nil {
			return nil, err
		}
		return mcpserver.Order(result)
	})
}
