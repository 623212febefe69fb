package idempotencyconnect_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"reflect"
	"sync"
	"testing"

	"connectrpc.com/connect"
	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/modules/rpc/idempotencyconnect"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/shopv1"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/suite"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/suite/connectserver"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/suite/grpcserver"
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

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// A handler without generated code declares by itself whether it has side effects.
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

// A handler may return one error to many calls at once, so the error must not be changed.
func TestSharedError(t *testing.T) {
	t.Parallel()
	shared := connect.NewError(connect.CodeNotFound, errors.New("no such thing"))
	c := connectserver.Start()(t, suite.Setup{
		Store: idempotencytest.NewStore(),
		Place: func(context.Context, *shopv1.PlaceOrderRequest, suite.Set) (*shopv1.Order, error) { return nil, shared },
	})
	before := *shared
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if r := c.Place(t.Context(), suite.Ask{Keys: []string{string(idempotency.NewKey())}}); r.Status.GetMessage() != "no such thing" {
				t.Errorf("got %v", r.Status)
			}
		})
	}
	wg.Wait()
	if !reflect.DeepEqual(*shared, before) {
		t.Errorf("the error was changed: %#v", shared)
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
			t.Errorf("%s is accepted", name)
		}
	}
	if _, err := idempotencyconnect.New(nil, nil, nil, idempotency.MiddlewareConfig{}); err == nil {
		t.Error("a nil store is accepted")
	}
}

func TestTransaction(t *testing.T) {
	t.Parallel()
	suite.TestTransaction(t, connectserver.Start(), func(ctx context.Context, store *idempotencypgx.Store, work func(context.Context, pgx.Tx) (*shopv1.Order, error)) (*shopv1.Order, error) {
		kept, err := store.Do(ctx, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			order, err := work(ctx, tx)
			return idempotencyconnect.Record(order, connectserver.Error(err, nil))
		})
		resp, err := idempotencyconnect.Reply[shopv1.Order](kept, err)
		if err != nil {
			return nil, err
		}
		return resp.Msg, nil
	})
}

// A key that was used over one protocol is replayed over the other.
func TestAcrossProtocols(t *testing.T) {
	t.Parallel()
	suite.TestAcross(t, [2]suite.Protocol{grpcserver.Start, connectserver.Start()}, idempotencytest.NewStore())
}
