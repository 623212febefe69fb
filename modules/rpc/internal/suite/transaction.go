package suite

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/shopv1"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// Transact runs work in a transaction of store and keeps its answer there, as a handler of a
// protocol does.
type Transact func(ctx context.Context, store *idempotencypgx.Store, work func(context.Context, pgx.Tx) (*shopv1.Order, error)) (*shopv1.Order, error)

// TestTransaction tests handlers that are one transaction.
func TestTransaction(t *testing.T, start Protocol, transact Transact) {
	type want struct {
		code   codes.Code
		reason string
	}
	for name, tt := range map[string]struct {
		faults       []txretrytest.Fault
		failure      error // of the first run
		first, again want
		effects      int
		replayed     bool
	}{
		"committed": {effects: 1, replayed: true},
		"the reply to COMMIT is lost, applied": {
			faults:  []txretrytest.Fault{{Point: txretrytest.ReplyLostApplied}},
			effects: 1, replayed: true,
		},
		"the reply to COMMIT is lost, not applied": {
			faults: []txretrytest.Fault{{Point: txretrytest.ReplyLostNotApplied}},
			first:  want{codes.Unavailable, "NOT_COMMITTED"}, effects: 1,
		},
		"a conflict": {
			faults:  []txretrytest.Fault{{Point: txretrytest.AtCommit, SQLSTATE: "40001"}},
			effects: 1, replayed: true,
		},
		"a final failure": {
			failure: Fail(codes.FailedPrecondition, "no funds"),
			first:   want{codes.FailedPrecondition, ""}, again: want{codes.FailedPrecondition, ""}, effects: 1, replayed: true,
		},
		"a failure that is not final": {
			failure: Fail(codes.Aborted, "not now"),
			first:   want{codes.Aborted, ""}, effects: 1,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store, err := idempotencytest.New(txretrytest.New(txretrytest.Config{Script: tt.faults}), idempotencypgx.Config{})
			if err != nil {
				t.Fatal(err)
			}
			effects, failure := 0, tt.failure
			c := start(t, Setup{Store: store, Place: func(ctx context.Context, req *shopv1.PlaceOrderRequest, _ Set) (*shopv1.Order, error) {
				return transact(ctx, store, func(_ context.Context, tx pgx.Tx) (*shopv1.Order, error) {
					if err := txretrytest.Effect(tx, func() { effects++ }, func() { effects-- }); err != nil {
						return nil, err
					}
					failed := failure
					if failure = nil; failed != nil {
						return nil, failed
					}
					return &shopv1.Order{Id: "1", Cents: req.GetCents()}, nil
				})
			}})
			ask := Ask{Keys: newKey(), Cents: 42}
			first := c.Place(t.Context(), ask)
			first.is(t, tt.first.code, "")
			if info, _ := detail[*errdetails.ErrorInfo](first); info.GetReason() != tt.first.reason {
				t.Errorf("first answer %v", first.Status)
			}
			again := c.Place(t.Context(), ask)
			if again.is(t, tt.again.code, ""); again.replayed() != tt.replayed || effects != tt.effects {
				t.Errorf("again %v, %d effects", again, effects)
			}
			if tt.replayed && !(proto.Equal(first.Order, again.Order) && proto.Equal(first.Status, again.Status)) {
				t.Errorf("first %v, again %v", first, again)
			}
			if last := c.Place(t.Context(), Ask{Keys: ask.Keys, Cents: 43}); effects != tt.effects {
				t.Errorf("another call with the key: %v", last)
			} else {
				last.is(t, codes.FailedPrecondition, "IDEMPOTENCY_KEY_REUSED")
			}
		})
	}
}
