package ratelimitgrpc_test

import (
	"testing"

	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/rpc/internal/suite"
	"github.com/holdfast-go/holdfast/rpc/internal/suite/grpcserver"
)

func newMemory(t *testing.T) ratelimit.Limiter {
	t.Helper()
	l, err := ratelimit.NewMemory(ratelimit.MemoryConfig{})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestLimits(t *testing.T) {
	t.Parallel()
	suite.TestLimits(t, grpcserver.Start, newMemory)
}
