// Package connectserver runs the suites over Connect.
package connectserver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"testing"

	"connectrpc.com/connect"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/modules/rpc/idempotencyconnect"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/answer"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/connectform"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/shopv1"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/shopv1/shopv1connect"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/suite"
	"github.com/holdfast-go/holdfast/modules/rpc/ratelimitconnect"
)

// Start returns a suite.Protocol whose clients have these options, such as another wire format.
func Start(options ...connect.ClientOption) suite.Protocol {
	return func(t *testing.T, s suite.Setup) suite.Client {
		t.Helper()
		var interceptors []connect.Interceptor
		if s.Limiter != nil {
			limits, err := ratelimitconnect.New(s.Limiter, s.Charges, s.Limits)
			if err != nil {
				t.Fatal(err)
			}
			interceptors = append(interceptors, limits)
		}
		if s.Store != nil {
			once, err := idempotencyconnect.New(s.Store, suite.User, s.Needs, s.Once)
			if err != nil {
				t.Fatal(err)
			}
			interceptors = append(interceptors, once)
		}
		recovering := connect.WithRecover(func(_ context.Context, _ connect.Spec, _ http.Header, p any) error {
			return connect.NewError(connect.CodeInternal, fmt.Errorf("%v", p))
		})
		mux := http.NewServeMux()
		mux.Handle(shopv1connect.NewShopHandler(&shop{setup: s}, recovering, connect.WithInterceptors(interceptors...)))
		mux.Handle(checkHealth, connect.NewUnaryHandler(checkHealth, healthy, recovering, connect.WithInterceptors(interceptors...)))
		mux.Handle(watchHealth, connect.NewServerStreamHandler(watchHealth, watch, recovering, connect.WithInterceptors(interceptors...)))
		server := httptest.NewUnstartedServer(mux)
		server.Config.Protocols = protocols()
		server.Start()
		transport := &http.Transport{Protocols: protocols()}
		t.Cleanup(func() {
			transport.CloseIdleConnections()
			server.Close()
		})
		caller := &http.Client{Transport: transport}
		return client{
			shopv1connect.NewShopClient(caller, server.URL, options...),
			connect.NewClient[healthRequest, healthResponse](caller, server.URL+checkHealth, options...),
			connect.NewClient[healthRequest, healthResponse](caller, server.URL+watchHealth, options...),
		}
	}
}

// protocols returns the protocols that gRPC over net/http needs without TLS.
func protocols() *http.Protocols {
	p := &http.Protocols{}
	p.SetUnencryptedHTTP2(true)
	return p
}

type shop struct{ setup suite.Setup }

func (s *shop) PlaceOrder(ctx context.Context, req *connect.Request[shopv1.PlaceOrderRequest]) (*connect.Response[shopv1.Order], error) {
	header := http.Header{} // by the response or the error, and the trailer by the call
	order, err := s.setup.Place(ctx, req.Msg, func(h, trailer http.Header) {
		maps.Copy(header, h)
		connectform.Send(ctx, nil, trailer)
	})
	if err != nil {
		return nil, Error(err, header)
	}
	resp := connect.NewResponse(order)
	maps.Copy(resp.Header(), header)
	return resp, nil
}

// Error converts a failure of the suite to an error of Connect. It returns every other error as it is.
func Error(err error, meta http.Header) error {
	if failed, ok := errors.AsType[*suite.Failure](err); ok {
		err := connectform.Error(failed.Status)
		maps.Copy(err.Meta(), meta)
		return err
	}
	return err
}

func (s *shop) GetOrder(context.Context, *connect.Request[shopv1.GetOrderRequest]) (*connect.Response[shopv1.Order], error) {
	return connect.NewResponse(&shopv1.Order{}), nil
}

func (s *shop) WatchOrders(ctx context.Context, _ *connect.Request[shopv1.WatchOrdersRequest], stream *connect.ServerStream[shopv1.Order]) error {
	if err := s.setup.Watching(ctx); err != nil {
		return err
	}
	return stream.Send(&shopv1.Order{})
}

const checkHealth, watchHealth = healthpb.Health_Check_FullMethodName, healthpb.Health_Watch_FullMethodName

type (
	healthRequest  = healthpb.HealthCheckRequest
	healthResponse = healthpb.HealthCheckResponse
)

func healthy(context.Context, *connect.Request[healthRequest]) (*connect.Response[healthResponse], error) {
	return connect.NewResponse(&healthResponse{Status: healthpb.HealthCheckResponse_SERVING}), nil
}

func watch(_ context.Context, _ *connect.Request[healthRequest], stream *connect.ServerStream[healthResponse]) error {
	return stream.Send(&healthResponse{Status: healthpb.HealthCheckResponse_SERVING})
}

type client struct {
	shopv1connect.ShopClient
	check, watch *connect.Client[healthRequest, healthResponse]
}

func (client) Bare() bool { return false }

func (client) Record(order *shopv1.Order) (idempotency.Response, error) {
	return answer.OfMessage(order)
}

func (c client) Health(ctx context.Context) error {
	_, err := c.check.CallUnary(ctx, connect.NewRequest(&healthRequest{}))
	stream, opened := c.watch.CallServerStream(ctx, connect.NewRequest(&healthRequest{}))
	if opened != nil {
		return errors.Join(err, opened)
	}
	for stream.Receive() {
	}
	return errors.Join(err, stream.Err(), stream.Close())
}

func asking[M any](m *M, a suite.Ask) *connect.Request[M] {
	req := connect.NewRequest(m)
	maps.Copy(req.Header(), a.Header())
	return req
}

func (c client) Place(ctx context.Context, a suite.Ask) suite.Reply {
	return reply(c.PlaceOrder(ctx, asking(a.Order(), a)))
}

func (c client) Get(ctx context.Context, a suite.Ask) suite.Reply {
	return reply(c.GetOrder(ctx, asking(&shopv1.GetOrderRequest{}, a)))
}

func (c client) Watch(ctx context.Context, a suite.Ask) suite.Reply {
	stream, err := c.WatchOrders(ctx, asking(&shopv1.WatchOrdersRequest{}, a))
	if err != nil {
		return failed(err)
	}
	received := stream.Receive()
	if err := errors.Join(stream.Err(), stream.Close()); err != nil || !received {
		return failed(stream.Err())
	}
	return suite.Reply{Header: stream.ResponseHeader(), Trailer: stream.ResponseTrailer()}
}

func reply(resp *connect.Response[shopv1.Order], err error) suite.Reply {
	if err != nil {
		return failed(err)
	}
	return suite.Reply{Order: resp.Msg, Header: resp.Header(), Trailer: resp.Trailer()}
}

func failed(err error) suite.Reply {
	r := suite.Reply{Status: &spb.Status{Code: int32(connect.CodeOf(err)), Message: err.Error()}}
	if own, ok := errors.AsType[*connect.Error](err); ok {
		r.Status, r.Header, r.Trailer = connectform.StatusOf(own), own.Meta(), own.Meta()
	}
	return r
}
