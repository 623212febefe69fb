package ratelimitgrpc_test

import (
	"testing"

	"github.com/holdfast-go/holdfast/rpc/internal/suite"
	"github.com/holdfast-go/holdfast/rpc/internal/suite/grpcserver"
)

func TestLimits(t *testing.T) {
	t.Parallel()
	suite.TestLimits(t, grpcserver.Start)
}
