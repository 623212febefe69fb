package suite

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/shopv1"
)

// TestAcross tests that servers of two protocols on one store are one service.
func TestAcross(t *testing.T, protocols [2]Protocol, store driver.Store) {
	var runs atomic.Int64
	var clients []Client
	for _, start := range protocols {
		clients = append(clients, start(t, Setup{Store: store, Place: func(_ context.Context, req *shopv1.PlaceOrderRequest, _ Set) (*shopv1.Order, error) {
			n := runs.Add(1)
			if req.GetCents() < 0 {
				return nil, Fail(codes.InvalidArgument, fmt.Sprint("refusal ", n), &errdetails.ErrorInfo{Reason: "NEGATIVE", Domain: "shop"})
			}
			return &shopv1.Order{Id: fmt.Sprint("order ", n)}, nil
		}}))
	}
	for n, first := range clients {
		for _, cents := range []int64{1, -1} {
			ask := Ask{Keys: newKey(), Cents: cents}
			want := first.Place(t.Context(), ask)
			for _, other := range clients {
				if got := other.Place(t.Context(), ask); !proto.Equal(got.Order, want.Order) || !proto.Equal(got.Status, want.Status) || !got.replayed() {
					t.Errorf("from protocol %d: %v, then %v", n, want, got)
				}
			}
			clients[1-n].Place(t.Context(), Ask{Keys: ask.Keys, Cents: 7}).is(t, codes.FailedPrecondition, "IDEMPOTENCY_KEY_REUSED")
		}
	}
}
