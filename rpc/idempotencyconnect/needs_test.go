package idempotencyconnect_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/rpc/idempotencyconnect"
	"github.com/holdfast-go/holdfast/rpc/internal/suite"
)

// A handler that was made by hand says itself whether it has side effects.
func TestNeedsBySpec(t *testing.T) {
	t.Parallel()
	once, err := idempotencyconnect.New(idempotencytest.NewStore(), suite.User, nil, idempotency.MiddlewareConfig{})
	if err != nil {
		t.Fatal(err)
	}
	for level, want := range map[connect.IdempotencyLevel]connect.Code{
		connect.IdempotencyNoSideEffects: 0,
		connect.IdempotencyIdempotent:    connect.CodeInvalidArgument,
		connect.IdempotencyUnknown:       connect.CodeInvalidArgument,
	} {
		const procedure = "/by.Hand/Do"
		server := httptest.NewServer(connect.NewUnaryHandler(procedure,
			func(context.Context, *connect.Request[emptypb.Empty]) (*connect.Response[emptypb.Empty], error) {
				return connect.NewResponse(&emptypb.Empty{}), nil
			}, connect.WithInterceptors(once), connect.WithIdempotency(level)))
		t.Cleanup(server.Close)
		client := connect.NewClient[emptypb.Empty, emptypb.Empty](&http.Client{Transport: server.Client().Transport}, server.URL+procedure)
		_, err := client.CallUnary(t.Context(), connect.NewRequest(&emptypb.Empty{}))
		if got := connect.CodeOf(err); err == nil && want != 0 || err != nil && got != want {
			t.Errorf("%v: %v, want %v", level, err, want)
		}
	}
}

func TestConfig(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]idempotency.MiddlewareConfig{
		"Methods":       {Methods: []string{http.MethodPost}},
		"CanonicalJSON": {CanonicalJSON: true},
		"KeepHeaders":   {KeepHeaders: []string{"Set-Cookie"}},
	} {
		if _, err := idempotencyconnect.New(idempotencytest.NewStore(), suite.User, nil, cfg); err == nil {
			t.Errorf("%s is taken", name)
		}
	}
	if _, err := idempotencyconnect.New(nil, nil, nil, idempotency.MiddlewareConfig{}); err == nil {
		t.Error("nothing is taken")
	}
}
