package idempotencygrpc_test

import (
	"testing"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/rpc/internal/suite"
	"github.com/holdfast-go/holdfast/rpc/internal/suite/grpcserver"
)

func TestOnce(t *testing.T) {
	t.Parallel()
	suite.TestOnce(t, grpcserver.Start, func(*testing.T) driver.Store { return idempotencytest.NewStore() })
}
