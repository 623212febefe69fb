package main

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"sync"

	"connectrpc.com/connect"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/holdfast-go/holdfast/modules/rpc/internal/shopv1"
)

var (
	errNothing = errors.New("an order costs something")
	errUnknown = errors.New("there is no such order")
)

// shop is the business code; it knows no protocol.
type shop struct {
	mu     sync.Mutex
	orders []*shopv1.Order
}

func (s *shop) place(req *shopv1.PlaceOrderRequest) (*shopv1.Order, error) {
	if req.GetCents() <= 0 {
		return nil, errNothing
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	o := &shopv1.Order{Id: strconv.Itoa(len(s.orders) + 1), Cents: req.GetCents()}
	s.orders = append(s.orders, o)
	return o, nil
}

func (s *shop) all() []*shopv1.Order {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.orders)
}

func (s *shop) get(id string) (*shopv1.Order, error) {
	for _, o := range s.all() {
		if o.GetId() == id {
			return o, nil
		}
	}
	return nil, errUnknown
}

func codeOf(err error) codes.Code {
	switch {
	case errors.Is(err, errNothing):
		return codes.InvalidArgument
	case errors.Is(err, errUnknown):
		return codes.NotFound
	}
	return codes.Internal
}

// grpcShop is the shop for gRPC.
type grpcShop struct {
	shopv1.UnimplementedShopServer
	shop *shop
}

func overGRPC(o *shopv1.Order, err error) (*shopv1.Order, error) {
	if err != nil {
		return nil, status.Error(codeOf(err), err.Error())
	}
	return o, nil
}

func (g grpcShop) PlaceOrder(_ context.Context, req *shopv1.PlaceOrderRequest) (*shopv1.Order, error) {
	return overGRPC(g.shop.place(req))
}

func (g grpcShop) GetOrder(_ context.Context, req *shopv1.GetOrderRequest) (*shopv1.Order, error) {
	return overGRPC(g.shop.get(req.GetId()))
}

func (g grpcShop) WatchOrders(_ *shopv1.WatchOrdersRequest, stream grpc.ServerStreamingServer[shopv1.Order]) error {
	for _, o := range g.shop.all() {
		if err := stream.Send(o); err != nil {
			return err
		}
	}
	return nil
}

// connectShop is the shop for Connect.
type connectShop struct{ shop *shop }

func overConnect(o *shopv1.Order, err error) (*connect.Response[shopv1.Order], error) {
	if err != nil {
		return nil, connect.NewError(connect.Code(codeOf(err)), err)
	}
	return connect.NewResponse(o), nil
}

func (c connectShop) PlaceOrder(_ context.Context, req *connect.Request[shopv1.PlaceOrderRequest]) (*connect.Response[shopv1.Order], error) {
	return overConnect(c.shop.place(req.Msg))
}

func (c connectShop) GetOrder(_ context.Context, req *connect.Request[shopv1.GetOrderRequest]) (*connect.Response[shopv1.Order], error) {
	return overConnect(c.shop.get(req.Msg.GetId()))
}

func (c connectShop) WatchOrders(_ context.Context, _ *connect.Request[shopv1.WatchOrdersRequest], stream *connect.ServerStream[shopv1.Order]) error {
	for _, o := range c.shop.all() {
		if err := stream.Send(o); err != nil {
			return err
		}
	}
	return nil
}
