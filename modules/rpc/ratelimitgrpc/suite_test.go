package ratelimitgrpc_test

import (
	"os"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/suite"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/suite/grpcserver"
)

func TestLimits(t *testing.T) {
	t.Parallel()
	suite.TestLimits(t, grpcserver.Start)
}

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }
