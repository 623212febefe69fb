package idempotencyconnect_test

import (
	"testing"

	"connectrpc.com/connect"

	"github.com/holdfast-go/holdfast/rpc/internal/suite"
	"github.com/holdfast-go/holdfast/rpc/internal/suite/connectserver"
)

func TestOnce(t *testing.T) {
	t.Parallel()
	for name, options := range map[string][]connect.ClientOption{
		"Connect":       nil,
		"Connect, JSON": {connect.WithProtoJSON()},
		"gRPC":          {connect.WithGRPC()},
		"gRPC-Web":      {connect.WithGRPCWeb()},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			suite.TestOnce(t, connectserver.Start(options...))
		})
	}
}

func TestTakeover(t *testing.T) {
	t.Parallel()
	suite.TestTakeover(t, connectserver.Start())
}
