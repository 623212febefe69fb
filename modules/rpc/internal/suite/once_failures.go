package suite

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/shopv1"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

func testNotKept(t *testing.T, o once) {
	for _, code := range []codes.Code{
		codes.Canceled, codes.Unknown, codes.DeadlineExceeded, codes.ResourceExhausted, codes.Aborted, codes.Unimplemented,
		codes.Internal, codes.Unavailable, codes.DataLoss, codes.Unauthenticated,
	} {
		var runs atomic.Int64
		c := o.serve(t, idempotency.MiddlewareConfig{}, func(context.Context, *shopv1.PlaceOrderRequest, Set) (*shopv1.Order, error) {
			if runs.Add(1) == 1 {
				return nil, Fail(code, "not now")
			}
			return &shopv1.Order{}, nil
		})
		ask := Ask{Keys: newKey()}
		c.Place(t.Context(), ask).is(t, code, "")
		again := c.Place(t.Context(), ask)
		if again.is(t, codes.OK, ""); again.replayed() {
			t.Errorf("after %v: marked as replayed", code)
		}
		if c.Place(t.Context(), ask).is(t, codes.OK, ""); runs.Load() != 2 {
			t.Errorf("after %v: %d runs, want 2", code, runs.Load())
		}
	}
}

func testFailureKept(t *testing.T, o once) {
	for _, code := range []codes.Code{
		codes.InvalidArgument, codes.NotFound, codes.AlreadyExists, codes.PermissionDenied, codes.FailedPrecondition, codes.OutOfRange,
	} {
		var runs atomic.Int64
		cfg := idempotency.MiddlewareConfig{KeepHeaders: []string{"X-Version"}}
		c := o.serve(t, cfg, func(_ context.Context, _ *shopv1.PlaceOrderRequest, set Set) (*shopv1.Order, error) {
			set(http.Header{"X-Version": {"1"}}, nil)
			return nil, Fail(code, fmt.Sprint("no: ", runs.Add(1)), &errdetails.ErrorInfo{Reason: "NO_FUNDS", Domain: "shop"})
		})
		ask := Ask{Keys: newKey()}
		first, again := c.Place(t.Context(), ask), c.Place(t.Context(), ask)
		first.is(t, code, "")
		if !proto.Equal(first.Status, again.Status) || runs.Load() != 1 || first.replayed() || !again.replayed() {
			t.Errorf("%v %v, then %v %v after %d runs", first.Status, first.Header, again.Status, again.Header, runs.Load())
		}
		if info, _ := detail[*errdetails.ErrorInfo](again); info.GetReason() != "NO_FUNDS" || again.Status.GetMessage() != "no: 1" || again.Header.Get("X-Version") != "1" && !c.Bare() {
			t.Errorf("again %v %v", again.Status, again.Header)
		}
	}
}

func testPanic(t *testing.T, o once) {
	var runs atomic.Int64
	c := o.serve(t, idempotency.MiddlewareConfig{}, func(ctx context.Context, req *shopv1.PlaceOrderRequest, set Set) (*shopv1.Order, error) {
		if order, err := counted(&runs)(ctx, req, set); runs.Load() > 1 {
			return order, err
		}
		panic("boom")
	})
	ask := Ask{Keys: newKey()}
	c.Place(t.Context(), ask).is(t, codes.Internal, "")
	if r := c.Place(t.Context(), ask); r.Order.GetId() != "order 2" {
		t.Errorf("after a panic: %v", r)
	}
}

func testUnkeepable(t *testing.T, o once) {
	var runs atomic.Int64
	cfg := idempotency.MiddlewareConfig{MaxResponseBytes: 100}
	c := o.serve(t, cfg, func(context.Context, *shopv1.PlaceOrderRequest, Set) (*shopv1.Order, error) {
		runs.Add(1)
		return &shopv1.Order{Id: strings.Repeat("x", 200)}, nil
	})
	ask := Ask{Keys: newKey()}
	if first := c.Place(t.Context(), ask); len(first.Order.GetId()) != 200 {
		t.Errorf("client got %v", first)
	}
	if c.Place(t.Context(), ask).is(t, codes.AlreadyExists, "IDEMPOTENCY_RESULT_UNAVAILABLE"); runs.Load() != 1 {
		t.Errorf("%d runs", runs.Load())
	}
}

// An answer that cannot be encoded is not sent, and the call does not take effect again.
func testUnencodable(t *testing.T, o once) {
	var runs atomic.Int64
	c := o.serve(t, idempotency.MiddlewareConfig{}, func(context.Context, *shopv1.PlaceOrderRequest, Set) (*shopv1.Order, error) {
		runs.Add(1)
		return &shopv1.Order{Id: "\xff is no text"}, nil
	})
	ask := Ask{Keys: newKey()}
	c.Place(t.Context(), ask).is(t, codes.Internal, "")
	if c.Place(t.Context(), ask).is(t, codes.AlreadyExists, "IDEMPOTENCY_RESULT_UNAVAILABLE"); runs.Load() != 1 {
		t.Errorf("%d runs", runs.Load())
	}
	claim := driver.NewClaim(driver.Key(idempotency.Key(ask.Keys[0]).In("ann")), driver.Fingerprint{})
	if out, err := o.store.Begin(t.Context(), claim); err != nil || out.State != driver.Completed || !out.Response.Unavailable() {
		t.Errorf("the record is %+v, %v; want a tombstone", out, err)
	}
}

// testNotUTF8: the text of a failure does not decide whether it is final.
func testNotUTF8(t *testing.T, o once) {
	for name, tt := range map[string]struct {
		err  error
		code codes.Code
		runs int64
	}{
		"no code":   {errors.New("file \xff is busy"), codes.Unknown, 2},
		"not final": {Fail(codes.Unavailable, "peer said \xff"), codes.Unavailable, 2},
		"final":     {Fail(codes.NotFound, "no file \xff"), codes.NotFound, 1},
	} {
		var runs atomic.Int64
		c := o.serve(t, idempotency.MiddlewareConfig{}, func(context.Context, *shopv1.PlaceOrderRequest, Set) (*shopv1.Order, error) {
			runs.Add(1)
			return nil, tt.err
		})
		ask := Ask{Keys: newKey()}
		c.Place(t.Context(), ask).is(t, tt.code, "")
		again := c.Place(t.Context(), ask)
		if again.is(t, tt.code, ""); runs.Load() != tt.runs || again.replayed() != (tt.runs == 1) {
			t.Errorf("%s: %v after %d runs", name, again.Status, runs.Load())
		}
		if want := strings.ToValidUTF8(tt.err.Error(), "\uFFFD"); tt.runs == 1 && again.Status.GetMessage() != want {
			t.Errorf("%s: %q, want %q", name, again.Status.GetMessage(), want)
		}
	}
}

// A failure that cannot be encoded frees the key if its code is not final.
func testFailureUnencodable(t *testing.T, o once) {
	for code, kept := range map[codes.Code]bool{codes.Unavailable: false, codes.NotFound: true} {
		var runs atomic.Int64
		c := o.serve(t, idempotency.MiddlewareConfig{}, func(context.Context, *shopv1.PlaceOrderRequest, Set) (*shopv1.Order, error) {
			if runs.Add(1) > 1 {
				return &shopv1.Order{}, nil
			}
			return nil, &Failure{Status: &spb.Status{Code: int32(code), Message: "no", Details: []*anypb.Any{{TypeUrl: "type.googleapis.com/\xff"}}}}
		})
		ask := Ask{Keys: newKey()}
		if first := c.Place(t.Context(), ask); first.code() == codes.OK {
			t.Errorf("%v: the client got %v", code, first)
		}
		again := c.Place(t.Context(), ask)
		if kept {
			again.is(t, codes.AlreadyExists, "IDEMPOTENCY_RESULT_UNAVAILABLE")
		} else {
			again.is(t, codes.OK, "")
		}
		if want := map[bool]int64{true: 1, false: 2}[kept]; runs.Load() != want {
			t.Errorf("%v: %d runs, want %d", code, runs.Load(), want)
		}
	}
}

// testSettled: a record that the handler has settled is the answer, whatever the handler returns.
func testSettled(t *testing.T, o once) {
	for _, earlier := range []bool{false, true} { // the record comes from an earlier run
		var c Client
		c = o.serve(t, idempotency.MiddlewareConfig{}, func(ctx context.Context, _ *shopv1.PlaceOrderRequest, _ Set) (*shopv1.Order, error) {
			settle(ctx, t, c, earlier)
			return nil, Fail(codes.Unavailable, "not the record")
		})
		ask := Ask{Keys: newKey()}
		for n := range 2 {
			if r := c.Place(t.Context(), ask); r.Order.GetId() != "kept" || r.replayed() != (earlier || n > 0) {
				t.Errorf("earlier %v, call %d: %v", earlier, n, r)
			}
		}
	}
}

// soldOut is a user's own error.
type soldOut struct{}

func (soldOut) Error() string             { return "secret" }
func (soldOut) Code() string              { return "SOLD_OUT" }
func (soldOut) HTTPStatus() int           { return http.StatusServiceUnavailable }
func (soldOut) RetryAfter() time.Duration { return time.Minute }

func testCoded(t *testing.T, o once) {
	c := o.serve(t, idempotency.MiddlewareConfig{}, func(context.Context, *shopv1.PlaceOrderRequest, Set) (*shopv1.Order, error) {
		return nil, fmt.Errorf("place: %w", soldOut{})
	})
	r := c.Place(t.Context(), Ask{Keys: newKey()})
	r.is(t, codes.Unavailable, "")
	info, _ := detail[*errdetails.ErrorInfo](r)
	if r.waits(t); info.GetReason() != "SOLD_OUT" || strings.Contains(r.Status.String(), "secret") {
		t.Errorf("got %v", r.Status)
	}
}

// domainError is a user's own error with any status.
type domainError int

func (domainError) Error() string     { return "domain" }
func (domainError) Code() string      { return "DOMAIN" }
func (e domainError) HTTPStatus() int { return int(e) }

// testBothDoors: an error is as final over RPC as over HTTP.
func testBothDoors(t *testing.T, o once) {
	for _, status := range []int{400, 401, 403, 404, 405, 408, 409, 410, 412, 413, 415, 416, 422, 423, 425, 428, 429, 451, 500, 501, 502, 503, 504, 507} {
		failure, runs := domainError(status), 0
		protect, err := idempotency.NewMiddleware(o.store, User, idempotency.MiddlewareConfig{})
		if err != nil {
			t.Fatal(err)
		}
		web := protect(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			runs++
			http.Error(w, failure.Code(), failure.HTTPStatus())
		}))
		ask := Ask{Keys: newKey()}
		for range 2 {
			r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/orders", http.NoBody)
			r.Header = ask.Header()
			web.ServeHTTP(httptest.NewRecorder(), r)
		}
		var calls atomic.Int64
		c := o.serve(t, idempotency.MiddlewareConfig{}, func(context.Context, *shopv1.PlaceOrderRequest, Set) (*shopv1.Order, error) {
			calls.Add(1)
			return nil, failure
		})
		ask.Keys = newKey()
		first, again := c.Place(t.Context(), ask), c.Place(t.Context(), ask)
		if calls.Load() != int64(runs) || first.code() == codes.OK || again.code() != first.code() {
			t.Errorf("%d: %d runs over HTTP, %d over RPC: %v, then %v", status, runs, calls.Load(), first.Status, again.Status)
		}
	}
}

// Transact runs work in a transaction of store and stores its answer there, as a protocol's
// handler does.
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
