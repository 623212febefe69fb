package idempotencygrpc_test

import (
	"testing"

	"github.com/holdfast-go/holdfast/rpc/internal/suite"
	"github.com/holdfast-go/holdfast/rpc/internal/suite/grpcserver"
)

func TestOnce(t *testing.T) {
	t.Parallel()
	suite.TestOnce(t, grpcserver.Start)
}

func TestTakeover(t *testing.T) {
	t.Parallel()
	suite.TestTakeover(t, grpcserver.Start)
}
