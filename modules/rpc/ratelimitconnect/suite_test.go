package ratelimitconnect_test

import (
	"context"
	"errors"
	"net/http"
	"os"
	"testing"

	"connectrpc.com/connect"

	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/shopv1"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/suite"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/suite/connectserver"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimittest"
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

// A handler may return one error to many calls, so the error must not be changed.
func TestSharedError(t *testing.T) {
	t.Parallel()
	shared := connect.NewError(connect.CodeNotFound, errors.New("no such thing"))
	c := connectserver.Start()(t, suite.Setup{
		Limiter: ratelimittest.New(),
		Charges: func(*http.Request) ([]ratelimit.Charge, error) {
			return []ratelimit.Charge{{Limit: ratelimit.Limit{Name: "all", Max: 100}}}, nil
		},
		Place: func(context.Context, *shopv1.PlaceOrderRequest, suite.Set) (*shopv1.Order, error) { return nil, shared },
		Store: idempotencytest.NewStore(),
	})
	for _, key := range []string{"a0eebc999c0b4ef8bb6d6bb9bd380a11", "6ecd8c99403648a8a1fbf1ba1a3b1f4b"} {
		for range 2 {
			r := c.Place(t.Context(), suite.Ask{Keys: []string{key}})
			if len(r.Header["Ratelimit"]) != 1 || r.Status.GetMessage() != "no such thing" {
				t.Errorf("got %v with %v", r.Status, r.Header)
			}
		}
	}
	if len(shared.Meta()) != 0 {
		t.Errorf("the error has %v", shared.Meta())
	}
}

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }
