package ratelimitconnect_test

import (
	"testing"

	"connectrpc.com/connect"

	"github.com/holdfast-go/holdfast/rpc/internal/suite"
	"github.com/holdfast-go/holdfast/rpc/internal/suite/connectserver"
)

func TestLimits(t *testing.T) {
	t.Parallel()
	for name, options := range map[string][]connect.ClientOption{
		"Connect":       nil,
		"Connect, JSON": {connect.WithProtoJSON()},
		"gRPC":          {connect.WithGRPC()},
		"gRPC-Web":      {connect.WithGRPCWeb()},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			suite.TestLimits(t, connectserver.Start(options...))
		})
	}
}
