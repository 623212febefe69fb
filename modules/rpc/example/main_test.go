package main

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/shopv1"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/shopv1/shopv1connect"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// running is the example with a client for each protocol.
type running struct {
	t         *testing.T
	byGRPC    shopv1.ShopClient
	byConnect shopv1connect.ShopClient
}

func run(t *testing.T) running {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	listeners := [2]net.Listener{}
	for i := range listeners {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		listeners[i] = l
	}
	ended := make(chan error)
	go func() { ended <- serve(ctx, listeners[0], listeners[1]) }()
	conn, err := grpc.NewClient(listeners[0].Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{}
	t.Cleanup(func() {
		closed := conn.Close()
		transport.CloseIdleConnections()
		stop()
		if err := errors.Join(closed, <-ended); err != nil {
			t.Error(err)
		}
	})
	return running{t, shopv1.NewShopClient(conn), shopv1connect.NewShopClient(&http.Client{Transport: transport}, "http://"+listeners[1].Addr().String())}
}

// overGRPC and overConnect place an order.
func (r running) overGRPC(user, key string, cents int64) (*shopv1.Order, codes.Code, error) {
	ctx := metadata.AppendToOutgoingContext(r.t.Context(), "x-user-id", user, "idempotency-key", key)
	o, err := r.byGRPC.PlaceOrder(ctx, &shopv1.PlaceOrderRequest{Cents: cents})
	return o, status.Code(err), err
}

func (r running) overConnect(user, key string, cents int64) (*shopv1.Order, codes.Code, error) {
	req := connect.NewRequest(&shopv1.PlaceOrderRequest{Cents: cents})
	req.Header().Set("X-User-Id", user)
	req.Header().Set("Idempotency-Key", key)
	resp, err := r.byConnect.PlaceOrder(r.t.Context(), req)
	if err != nil {
		return nil, codes.Code(connect.CodeOf(err)), err
	}
	return resp.Msg, codes.OK, nil
}

// One key is one order, over either protocol.
func TestOneOrder(t *testing.T) {
	t.Parallel()
	r := run(t)
	for n := range 30 { // replays are refunded
		place := r.overGRPC
		if n%2 == 1 {
			place = r.overConnect
		}
		if o, _, err := place("ann", "order-1", 4200); err != nil || o.GetId() != "1" || o.GetCents() != 4200 {
			t.Fatalf("try %d: %v, %v", n, o, err)
		}
	}
	if _, code, err := r.overConnect("ann", "order-1", 1); code != codes.FailedPrecondition {
		t.Errorf("another order with the key: %v", err)
	}
	if o, _, err := r.overConnect("bob", "order-1", 1); err != nil || o.GetId() != "2" {
		t.Errorf("bob got %v, %v", o, err)
	}
	for range 2 {
		if _, code, err := r.overGRPC("bob", "order-2", -1); code != codes.InvalidArgument || status.Convert(err).Message() != errNothing.Error() {
			t.Errorf("an order without a price: %v", err)
		}
	}
	if got, err := r.byGRPC.GetOrder(t.Context(), &shopv1.GetOrderRequest{Id: "2"}); err != nil || got.GetCents() != 1 {
		t.Errorf("order 2 is %v, %v", got, err)
	}
	_, err := r.byConnect.GetOrder(t.Context(), connect.NewRequest(&shopv1.GetOrderRequest{Id: "3"}))
	if connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("order 3: %v", err)
	}
}

// Both protocols share one limit.
func TestLimit(t *testing.T) {
	t.Parallel()
	r := run(t)
	for n := range 10 {
		place := r.overGRPC
		if n%2 == 1 {
			place = r.overConnect
		}
		if _, _, err := place("ann", string(rune('a'+n)), 1); err != nil {
			t.Fatal(err)
		}
	}
	_, code, err := r.overGRPC("ann", "one-more", 1)
	var retry *errdetails.RetryInfo
	for _, d := range status.Convert(err).Details() {
		if info, ok := d.(*errdetails.RetryInfo); ok {
			retry = info
		}
	}
	if code != codes.ResourceExhausted || retry.GetRetryDelay().AsDuration() <= 0 {
		t.Errorf("the eleventh: %v, %v", err, retry)
	}
	if _, code, err := r.overConnect("ann", "one-more", 1); code != codes.ResourceExhausted {
		t.Errorf("the eleventh by Connect: %v", err)
	}
	if _, _, err := r.overGRPC("bob", "one", 1); err != nil {
		t.Errorf("bob: %v", err)
	}
	streams := 0
	stream, err := r.byConnect.WatchOrders(t.Context(), connect.NewRequest(&shopv1.WatchOrdersRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	for stream.Receive() {
		streams++
	}
	if err := errors.Join(stream.Err(), stream.Close()); err != nil || streams != 11 {
		t.Errorf("%d orders, %v", streams, err)
	}
}
