// Command example is a shop that takes orders over gRPC and over Connect. Rate limits and
// idempotency keys protect both, on one limiter and one store, here in memory.
//
//	go run ./modules/rpc/example
package main

import (
	"context"
	"errors"
	"flag"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/modules/rpc/idempotencyconnect"
	"github.com/holdfast-go/holdfast/modules/rpc/idempotencygrpc"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/shopv1"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/shopv1/shopv1connect"
	"github.com/holdfast-go/holdfast/modules/rpc/ratelimitconnect"
	"github.com/holdfast-go/holdfast/modules/rpc/ratelimitgrpc"
	"github.com/holdfast-go/holdfast/ratelimit"
)

// user returns the owner of keys and limits; yours comes from authentication.
func user(r *http.Request) (string, error) { return ratelimit.HeaderKey("X-User-Id")(r) }

// charges returns the cost of a call: an order is one of ten per minute and user, other calls are free.
func charges(r *http.Request) ([]ratelimit.Charge, error) {
	if r.URL.Path != shopv1.Shop_PlaceOrder_FullMethodName {
		return nil, nil
	}
	id, err := user(r)
	return []ratelimit.Charge{{Limit: ratelimit.Limit{Name: "orders", Max: 10}, Key: id}}, err
}

// keys are opaque strings of the clients. Replays are refunded.
var keys = idempotency.MiddlewareConfig{
	ParseKey: idempotency.ParseOpaque,
	OnReplay: func(r *http.Request) {
		if err := ratelimit.RefundFrom(r.Context()); err != nil {
			log.Print(err)
		}
	},
}

func grpcServer(store driver.Store, limiter ratelimit.Limiter, s *shop) (*grpc.Server, error) {
	limits, err := ratelimitgrpc.New(limiter, charges, ratelimit.MiddlewareConfig{})
	if err != nil {
		return nil, err
	}
	once, err := idempotencygrpc.New(store, user, nil, keys) // nil: procedures with side effects need a key
	if err != nil {
		return nil, err
	}
	server := grpc.NewServer(
		grpc.ChainUnaryInterceptor(limits.Unary, once.Unary), // behind authentication
		grpc.ChainStreamInterceptor(limits.Stream),
	)
	shopv1.RegisterShopServer(server, grpcShop{shop: s})
	return server, nil
}

func connectHandler(store driver.Store, limiter ratelimit.Limiter, s *shop) (http.Handler, error) {
	limits, err := ratelimitconnect.New(limiter, charges, ratelimit.MiddlewareConfig{})
	if err != nil {
		return nil, err
	}
	once, err := idempotencyconnect.New(store, user, nil, keys)
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.Handle(shopv1connect.NewShopHandler(connectShop{s}, connect.WithInterceptors(limits, once)))
	return mux, nil
}

func main() {
	grpcAddr := flag.String("grpc", "127.0.0.1:50051", "`address` for gRPC")
	connectAddr := flag.String("connect", "127.0.0.1:8080", "`address` for Connect")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	forGRPC, err := net.Listen("tcp", *grpcAddr)
	check(err)
	forConnect, err := net.Listen("tcp", *connectAddr)
	check(err)
	log.Printf("listening; try\ncurl -i http://%s%s -H 'Content-Type: application/json' -H 'X-User-Id: me' -H 'Idempotency-Key: order-1' -d '{\"cents\": 4200}'",
		forConnect.Addr(), shopv1connect.ShopPlaceOrderProcedure)
	check(serve(ctx, forGRPC, forConnect))
}

// serve runs both servers until ctx ends.
func serve(ctx context.Context, forGRPC, forConnect net.Listener) error {
	limiter, err := ratelimit.NewMemory(ratelimit.MemoryConfig{}) // ratelimitredis.New in production
	if err != nil {
		return err
	}
	store, s := idempotencytest.NewStore(), &shop{} // idempotencypgx.New, with Record and Reply, in production
	byGRPC, err := grpcServer(store, limiter, s)
	if err != nil {
		return err
	}
	byConnect, err := connectHandler(store, limiter, s)
	if err != nil {
		return err
	}
	server := &http.Server{Handler: byConnect, ReadTimeout: 10 * time.Second, WriteTimeout: 30 * time.Second}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return byGRPC.Serve(forGRPC) })
	group.Go(func() error {
		if err := server.Serve(forConnect); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	group.Go(func() error {
		<-ctx.Done()
		byGRPC.GracefulStop()
		return server.Shutdown(context.WithoutCancel(ctx))
	})
	return group.Wait()
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

var (
	errNothing = errors.New("an order costs something")
	errUnknown = errors.New("there is no such order")
)

// shop is the business code, without any protocol.
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
