// Package grpcserver runs the suites over gRPC.
package grpcserver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"testing"

	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/modules/rpc/idempotencygrpc"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/answer"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/grpcform"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/shopv1"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/suite"
	"github.com/holdfast-go/holdfast/modules/rpc/ratelimitgrpc"
)

// Start is a suite.Protocol.
func Start(t *testing.T, s suite.Setup) suite.Client {
	t.Helper()
	unary := []grpc.UnaryServerInterceptor{recovering}
	var stream []grpc.StreamServerInterceptor
	if s.Limiter != nil {
		limits, err := ratelimitgrpc.New(s.Limiter, s.Charges, s.Limits)
		if err != nil {
			t.Fatal(err)
		}
		unary, stream = append(unary, limits.Unary), append(stream, limits.Stream)
	}
	if s.Store != nil {
		once, err := idempotencygrpc.New(s.Store, suite.User, s.Needs, s.Once)
		if err != nil {
			t.Fatal(err)
		}
		unary = append(unary, once.Unary)
	}
	server := grpc.NewServer(grpc.ChainUnaryInterceptor(unary...), grpc.ChainStreamInterceptor(stream...))
	shopv1.RegisterShopServer(server, &shop{setup: s})
	healthpb.RegisterHealthServer(server, health.NewServer())
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error)
	go func() { ended <- server.Serve(listener) }()
	conn, err := grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
		server.Stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return client{shopv1.NewShopClient(conn), healthpb.NewHealthClient(conn)}
}

// recovering turns panics into errors, as servers do.
func recovering(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = status.Error(codes.Internal, fmt.Sprint(p))
		}
	}()
	return handler(ctx, req)
}

type shop struct {
	shopv1.UnimplementedShopServer
	setup suite.Setup
}

func (s *shop) PlaceOrder(ctx context.Context, req *shopv1.PlaceOrderRequest) (*shopv1.Order, error) {
	order, err := s.setup.Place(ctx, req, func(header, trailer http.Header) {
		if err := errors.Join(grpc.SetHeader(ctx, grpcform.Metadata(header)), grpc.SetTrailer(ctx, grpcform.Metadata(trailer))); err != nil {
			panic(err)
		}
	})
	return order, Error(err)
}

// Error converts a failure of the suite to an error of gRPC. It returns every other error as it is.
func Error(err error) error {
	if failed, ok := errors.AsType[*suite.Failure](err); ok {
		return status.FromProto(failed.Status).Err()
	}
	return err
}

func (s *shop) GetOrder(context.Context, *shopv1.GetOrderRequest) (*shopv1.Order, error) {
	return &shopv1.Order{}, nil
}

func (s *shop) WatchOrders(_ *shopv1.WatchOrdersRequest, stream grpc.ServerStreamingServer[shopv1.Order]) error {
	if err := s.setup.Watching(stream.Context()); err != nil {
		return err
	}
	return stream.Send(&shopv1.Order{})
}

type client struct {
	shopv1.ShopClient
	health healthpb.HealthClient
}

func (client) Bare() bool { return false }

func (client) Record(order *shopv1.Order) (idempotency.Response, error) {
	return answer.OfMessage(order)
}

func (c client) Health(ctx context.Context) error {
	_, err := c.health.Check(ctx, &healthpb.HealthCheckRequest{})
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, opened := c.health.Watch(ctx, &healthpb.HealthCheckRequest{})
	if opened != nil {
		return errors.Join(err, opened)
	}
	_, received := stream.Recv()
	return errors.Join(err, received)
}

func outgoing(ctx context.Context, a suite.Ask) context.Context {
	return metadata.NewOutgoingContext(ctx, grpcform.Metadata(a.Header()))
}

func (c client) Place(ctx context.Context, a suite.Ask) suite.Reply {
	var header, trailer metadata.MD
	order, err := c.PlaceOrder(outgoing(ctx, a), a.Order(), grpc.Header(&header), grpc.Trailer(&trailer))
	return reply(order, err, header, trailer)
}

func (c client) Get(ctx context.Context, a suite.Ask) suite.Reply {
	var header, trailer metadata.MD
	order, err := c.GetOrder(outgoing(ctx, a), &shopv1.GetOrderRequest{}, grpc.Header(&header), grpc.Trailer(&trailer))
	return reply(order, err, header, trailer)
}

func (c client) Watch(ctx context.Context, a suite.Ask) suite.Reply {
	ctx, cancel := context.WithCancel(outgoing(ctx, a))
	defer cancel()
	stream, err := c.WatchOrders(ctx, &shopv1.WatchOrdersRequest{})
	if err != nil {
		return reply(nil, err, nil, nil)
	}
	order, err := stream.Recv()
	header, headerErr := stream.Header()
	return reply(order, errors.Join(err, headerErr), header, stream.Trailer())
}

func reply(order *shopv1.Order, err error, header, trailer metadata.MD) suite.Reply {
	var failed *spb.Status
	if err != nil {
		failed = status.Convert(err).Proto()
	}
	return suite.Reply{Order: order, Status: failed, Header: grpcform.Header(header), Trailer: grpcform.Header(trailer)}
}
