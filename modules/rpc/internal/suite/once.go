package suite

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/shopv1"
)

// TestOnce tests idempotency on every store. The cases are the ones of the HTTP middleware, and
// the ones specific to RPC.
func TestOnce(t *testing.T, start Protocol) {
	for name, store := range Stores(t, 30*time.Second) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testOnce(t, once{start, store})
		})
	}
}

func testOnce(t *testing.T, o once) {
	for name, test := range map[string]func(t *testing.T, o once){
		"a repetition gets the first answer": testReplay,
		"a call in flight":                   testInFlight,
		"a key of another call":              testReused,
		"fields that are unknown":            testUnknownFields,
		"metadata of the first answer":       testFirstMetadata,
		"a settled claim with metadata":      testSettledMetadata,
		"a key of another caller":            testScope,
		"a code that is not final":           testNotKept,
		"a failure that is final":            testFailureKept,
		"a panic frees the key":              testPanic,
		"a result that cannot be kept":       testUnkeepable,
		"a result that cannot be encoded":    testUnencodable,
		"a failure that is not UTF-8":        testNotUTF8,
		"a failure that cannot be encoded":   testFailureUnencodable,
		"a settled claim":                    testSettled,
		"a lost lease cancels the handler":   testLeaseLost,
		"a client that went away":            testClientGone,
		"an effect that stays":               testEffect,
		"an error with a code of its own":    testCoded,
		"an error over HTTP and RPC":         testBothDoors,
		"32 calls with one key, 20 times":    testStampede,
		"no key, a wrong one, two":           testKeys,
		"procedures that need no key":        testNeeds,
		"health":                             testHealth,
		"a store that is down":               testStoreDown,
		"a scope that fails":                 testScopeFails,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, o)
		})
	}
}

type once struct {
	start Protocol
	store driver.Store
}

type place = func(ctx context.Context, req *shopv1.PlaceOrderRequest, set Set) (*shopv1.Order, error)

func (o once) serve(t *testing.T, cfg idempotency.MiddlewareConfig, fn place) Client {
	t.Helper()
	cfg.Logger = slog.New(slog.DiscardHandler)
	return o.start(t, Setup{Store: o.store, Once: cfg, Place: fn})
}

func newKey() []string { return []string{string(idempotency.NewKey())} }

// counted makes orders, and counts them.
func counted(runs *atomic.Int64) place {
	return func(_ context.Context, req *shopv1.PlaceOrderRequest, _ Set) (*shopv1.Order, error) {
		return &shopv1.Order{Id: fmt.Sprint("order ", runs.Add(1)), Cents: req.GetCents()}, nil
	}
}

func testReplay(t *testing.T, o once) {
	var runs, refunds atomic.Int64
	cfg := idempotency.MiddlewareConfig{
		KeepHeaders: []string{"X-Version", "Location"},
		OnReplay: func(r *http.Request) {
			if r.URL.Path != shopv1.Shop_PlaceOrder_FullMethodName || r.Header.Get("X-User") != "ann" {
				t.Errorf("OnReplay of %s %v", r.URL, r.Header)
			}
			refunds.Add(1)
		},
	}
	c := o.serve(t, cfg, func(ctx context.Context, req *shopv1.PlaceOrderRequest, set Set) (*shopv1.Order, error) {
		set(http.Header{"X-Version": {"1", "2"}, "X-Request-Id": {"7"}, "Set-Cookie": {"secret"}}, http.Header{"X-Version": {"3"}, "X-Cost": {"4"}})
		return counted(&runs)(ctx, req, set)
	})
	ask := Ask{Keys: newKey(), Cents: 42, Labels: map[string]string{}}
	for n := range 20 {
		ask.Labels[fmt.Sprint("label ", n)] = "x"
	}
	first := c.Place(t.Context(), ask)
	if first.is(t, codes.OK, ""); first.replayed() || !c.Bare() && (first.Header.Get("X-Request-Id") != "7" || first.Trailer.Get("X-Cost") != "4" || len(first.Header["X-Version"]) != 2) {
		t.Errorf("first answer has %v and %v", first.Header, first.Trailer)
	}
	quoted := ask
	quoted.Keys = []string{`"` + ask.Keys[0] + `"`}
	for _, a := range []Ask{ask, quoted} {
		again := c.Place(t.Context(), a)
		if again.is(t, codes.OK, ""); !proto.Equal(again.Order, first.Order) || !again.replayed() {
			t.Errorf("repetition %v %v; want %v and marked", again.Order, again.Header, first.Order)
		}
		if got := strings.Join(again.Header["X-Version"], " ") + " " + again.Trailer.Get("X-Version"); got != "1 2 3" && !c.Bare() {
			t.Errorf("repetition has %v and %v", again.Header, again.Trailer)
		}
		if again.Header.Get("X-Request-Id")+again.Header.Get("Set-Cookie")+again.Trailer.Get("X-Cost") != "" {
			t.Errorf("repetition has metadata of the first: %v and %v", again.Header, again.Trailer)
		}
	}
	if runs.Load() != 1 || refunds.Load() != 2 {
		t.Errorf("%d runs, %d refunds; want 1 and 2", runs.Load(), refunds.Load())
	}
}

func testInFlight(t *testing.T, o once) {
	var runs atomic.Int64
	entered, leave := make(chan struct{}), make(chan struct{})
	c := o.serve(t, idempotency.MiddlewareConfig{}, func(ctx context.Context, req *shopv1.PlaceOrderRequest, set Set) (*shopv1.Order, error) {
		close(entered)
		<-leave
		return counted(&runs)(ctx, req, set)
	})
	ask := Ask{Keys: newKey()}
	done := make(chan Reply)
	go func() { done <- c.Place(context.WithoutCancel(t.Context()), ask) }()
	<-entered
	busy := c.Place(t.Context(), ask)
	close(leave)
	busy.is(t, codes.Aborted, "IDEMPOTENCY_KEY_IN_USE")
	busy.waits(t)
	first := <-done
	first.is(t, codes.OK, "")
	if again := c.Place(t.Context(), ask); !proto.Equal(again.Order, first.Order) || !again.replayed() {
		t.Errorf("after the end: %v", again)
	}
}

func testReused(t *testing.T, o once) {
	var runs atomic.Int64
	all := func(string) bool { return true }
	c := o.start(t, Setup{Store: o.store, Needs: all, Place: counted(&runs)})
	ask := Ask{Keys: newKey(), Cents: 1}
	c.Place(t.Context(), ask).is(t, codes.OK, "")
	for _, other := range []Ask{{Cents: 2}, {Cents: 1, Labels: map[string]string{"a": "b"}}} {
		other.Keys = ask.Keys
		c.Place(t.Context(), other).is(t, codes.FailedPrecondition, "IDEMPOTENCY_KEY_REUSED")
	}
	c.Get(t.Context(), ask).is(t, codes.FailedPrecondition, "IDEMPOTENCY_KEY_REUSED")
}

// testUnknownFields: fields that a server does not know keep the order of the wire.
func testUnknownFields(t *testing.T, o once) {
	var runs atomic.Int64
	c := o.serve(t, idempotency.MiddlewareConfig{}, counted(&runs))
	ten := protowire.AppendVarint(protowire.AppendTag(nil, 10, protowire.VarintType), 1)
	eleven := protowire.AppendVarint(protowire.AppendTag(nil, 11, protowire.VarintType), 2)
	ask := Ask{Keys: newKey(), Cents: 1, Unknown: slices.Concat(ten, eleven)}
	c.Place(t.Context(), ask).is(t, codes.OK, "")
	ask.Unknown = slices.Concat(eleven, ten)
	again := c.Place(t.Context(), ask)
	if again.is(t, codes.OK, ""); !again.replayed() || runs.Load() != 1 {
		t.Errorf("again %v after %d runs", again, runs.Load())
	}
}

// testFirstMetadata: the first answer has the handler's metadata once. It is the handler's answer
// even if its metadata has the replay header of another server.
func testFirstMetadata(t *testing.T, o once) {
	c := o.serve(t, idempotency.MiddlewareConfig{KeepHeaders: []string{"X-Version"}}, func(_ context.Context, _ *shopv1.PlaceOrderRequest, set Set) (*shopv1.Order, error) {
		set(http.Header{"X-Version": {"1"}, idempotency.ReplayedHeader: {"true"}, "X-Request-Id": {"7"}}, http.Header{"X-Version": {"2"}})
		return &shopv1.Order{Id: "1"}, nil
	})
	first := c.Place(t.Context(), Ask{Keys: newKey()})
	if first.is(t, codes.OK, ""); c.Bare() {
		return
	}
	if len(first.Header["X-Version"]) != 1 || len(first.Header["X-Request-Id"]) != 1 || len(first.Trailer["X-Version"]) != 1 || len(first.Header[idempotency.ReplayedHeader]) != 1 {
		t.Errorf("first answer has %v and %v", first.Header, first.Trailer)
	}
}

// testSettledMetadata: the metadata of an answer that does not count is sent once, or not at all.
func testSettledMetadata(t *testing.T, o once) {
	var c Client
	c = o.serve(t, idempotency.MiddlewareConfig{}, func(ctx context.Context, _ *shopv1.PlaceOrderRequest, set Set) (*shopv1.Order, error) {
		set(http.Header{"X-Version": {"1"}}, http.Header{"X-Cost": {"2"}})
		settle(ctx, t, c, false)
		return &shopv1.Order{Id: "not the record"}, nil
	})
	r := c.Place(t.Context(), Ask{Keys: newKey()})
	if r.Order.GetId() != "kept" || len(r.Header["X-Version"]) > 1 || len(r.Trailer["X-Cost"]) > 1 {
		t.Errorf("got %v with %v and %v", r.Order, r.Header, r.Trailer)
	}
}

// settle settles the claim of a handler with an order.
func settle(ctx context.Context, t *testing.T, c Client, replayed bool) {
	t.Helper()
	kept, err := c.Record(&shopv1.Order{Id: "kept"})
	if err != nil {
		t.Error(err)
	}
	claim, _ := driver.ClaimFrom(ctx)
	claim.Settle(driver.BeginResult{State: driver.Completed, Fingerprint: claim.Fingerprint, Response: driver.Response(kept)}, replayed)
}

func testScope(t *testing.T, o once) {
	var runs atomic.Int64
	c := o.serve(t, idempotency.MiddlewareConfig{}, counted(&runs))
	key := newKey()
	for n, user := range []string{"ann", "bob"} {
		if r := c.Place(t.Context(), Ask{Keys: key, User: user}); r.Order.GetId() != fmt.Sprint("order ", n+1) || r.replayed() {
			t.Errorf("%s got %v", user, r)
		}
	}
}

func testEffect(t *testing.T, o once) {
	var runs atomic.Int64
	c := o.serve(t, idempotency.MiddlewareConfig{}, func(ctx context.Context, _ *shopv1.PlaceOrderRequest, _ Set) (*shopv1.Order, error) {
		runs.Add(1)
		idempotency.MarkEffect(ctx)
		return nil, Fail(codes.Unavailable, "the provider does not answer")
	})
	ask := Ask{Keys: newKey()}
	first, again := c.Place(t.Context(), ask), c.Place(t.Context(), ask)
	if first.is(t, codes.Unavailable, ""); !proto.Equal(first.Status, again.Status) || !again.replayed() || runs.Load() != 1 {
		t.Errorf("%v, then %v after %d runs", first, again, runs.Load())
	}
}

func testKeys(t *testing.T, o once) {
	var runs atomic.Int64
	key := newKey()
	for name, tt := range map[string]struct {
		cfg    idempotency.MiddlewareConfig
		keys   []string
		code   codes.Code
		reason string
	}{
		"none":              {code: codes.InvalidArgument, reason: "IDEMPOTENCY_KEY_REQUIRED"},
		"none, optional":    {cfg: idempotency.MiddlewareConfig{Optional: true}},
		"wrong":             {keys: []string{"order-42"}, code: codes.InvalidArgument, reason: "IDEMPOTENCY_KEY_INVALID"},
		"wrong, optional":   {cfg: idempotency.MiddlewareConfig{Optional: true}, keys: []string{"x"}, code: codes.InvalidArgument, reason: "IDEMPOTENCY_KEY_INVALID"},
		"right for another": {cfg: idempotency.MiddlewareConfig{ParseKey: idempotency.ParseOpaque}, keys: []string{"order-42"}},
		"two":               {keys: append(newKey(), newKey()...), code: codes.InvalidArgument, reason: "IDEMPOTENCY_KEY_INVALID"},
		"right":             {keys: key},
	} {
		before := runs.Load()
		r := o.serve(t, tt.cfg, counted(&runs)).Place(t.Context(), Ask{Keys: tt.keys})
		if r.is(t, tt.code, tt.reason); runs.Load()-before != map[bool]int64{true: 1}[tt.code == codes.OK] {
			t.Errorf("%s: %d runs", name, runs.Load()-before)
		}
	}
}

// testHealth: a probe without a key is answered, whatever needs is.
func testHealth(t *testing.T, o once) {
	for _, needs := range []func(string) bool{nil, func(string) bool { return true }} {
		c := o.start(t, Setup{Store: o.store, Needs: needs})
		if err := c.Health(t.Context()); err != nil {
			t.Errorf("health: %v", err)
		}
	}
}

func testNeeds(t *testing.T, o once) {
	var runs atomic.Int64
	c := o.serve(t, idempotency.MiddlewareConfig{}, counted(&runs))
	c.Get(t.Context(), Ask{}).is(t, codes.OK, "") // has no side effects
	c.Get(t.Context(), Ask{Keys: []string{"malformed"}}).is(t, codes.OK, "")
	c.Watch(t.Context(), Ask{}).is(t, codes.OK, "") // a stream
	c.Place(t.Context(), Ask{}).is(t, codes.InvalidArgument, "IDEMPOTENCY_KEY_REQUIRED")

	only := o.start(t, Setup{Store: o.store, Place: counted(&runs), Needs: func(procedure string) bool {
		return procedure == shopv1.Shop_GetOrder_FullMethodName
	}})
	only.Place(t.Context(), Ask{}).is(t, codes.OK, "")
	only.Get(t.Context(), Ask{}).is(t, codes.InvalidArgument, "IDEMPOTENCY_KEY_REQUIRED")
}

// losing is a store that loses every claim at once.
type losing struct{ driver.Store }

func (s losing) Begin(ctx context.Context, claim driver.Claim) (driver.BeginResult, error) {
	out, err := s.Store.Begin(ctx, claim)
	out.Lease = min(out.Lease, 30*time.Millisecond)
	return out, err
}

func (losing) Extend(context.Context, driver.Claim) error  { return driver.ErrLeaseLost }
func (losing) Release(context.Context, driver.Claim) error { return driver.ErrLeaseLost }

func testLeaseLost(t *testing.T, o once) {
	o.store = losing{o.store}
	c := o.serve(t, idempotency.MiddlewareConfig{}, func(ctx context.Context, _ *shopv1.PlaceOrderRequest, _ Set) (*shopv1.Order, error) {
		select {
		case <-ctx.Done():
			if cause := context.Cause(ctx); !errors.Is(cause, idempotency.ErrLeaseLost) {
				t.Errorf("cause %v; want ErrLeaseLost", cause)
			}
		case <-time.After(Patience):
			t.Error("handler not cancelled")
		}
		return nil, ctx.Err()
	})
	r := c.Place(t.Context(), Ask{Keys: newKey()})
	r.is(t, codes.Unavailable, "IDEMPOTENCY_STORE_UNAVAILABLE")
	r.waits(t)
}

func testClientGone(t *testing.T, o once) {
	var runs atomic.Int64
	ctx, hangUp := context.WithCancel(t.Context())
	gone := make(chan struct{})
	c := o.serve(t, idempotency.MiddlewareConfig{}, func(ctx context.Context, req *shopv1.PlaceOrderRequest, set Set) (*shopv1.Order, error) {
		hangUp()
		<-gone
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		return counted(&runs)(ctx, req, set)
	})
	ask := Ask{Keys: newKey()}
	c.Place(ctx, ask).is(t, codes.Canceled, "")
	close(gone)
	deadline := time.Now().Add(Patience)
	for {
		again := c.Place(t.Context(), ask)
		if again.code() == codes.OK {
			if again.Order.GetId() != "order 1" || !again.replayed() {
				t.Errorf("after the client hung up: %v", again)
			}
			return
		}
		if again.is(t, codes.Aborted, "IDEMPOTENCY_KEY_IN_USE"); time.Now().After(deadline) || t.Failed() {
			t.Fatal("the answer was not kept")
		}
	}
}

func testStampede(t *testing.T, o once) {
	const keys, clients, retries = 20, 32, 5
	var runs atomic.Int64
	c := o.serve(t, idempotency.MiddlewareConfig{}, counted(&runs))
	for n, left := 0, retries; n < keys; {
		ask, before := Ask{Keys: newKey()}, runs.Load()
		var fresh, unavailable atomic.Int64
		var wg sync.WaitGroup
		for range clients {
			wg.Go(func() {
				r := c.Place(t.Context(), ask)
				switch {
				case r.code() == codes.Aborted:
				case r.code() == codes.Unavailable:
					unavailable.Add(1)
				case r.Order.GetId() != fmt.Sprint("order ", before+1):
					t.Errorf("got %v", r)
				case !r.replayed():
					fresh.Add(1)
				}
			})
		}
		wg.Wait()
		if unavailable.Load() > 0 && left > 0 { // the machine stalled: try another key
			left--
			continue
		}
		if made := runs.Load() - before; made != 1 || fresh.Load() != 1 || unavailable.Load() > 0 {
			t.Fatalf("key %d: %d runs, %d fresh answers, %d times unavailable", n+1, made, fresh.Load(), unavailable.Load())
		}
		n, left = n+1, retries
	}
}

// down is a store that does not answer.
type down struct{ driver.Store }

func (down) Begin(context.Context, driver.Claim) (driver.BeginResult, error) {
	return driver.BeginResult{}, errors.New("connection refused")
}

func testStoreDown(t *testing.T, o once) {
	var runs atomic.Int64
	o.store = down{o.store}
	r := o.serve(t, idempotency.MiddlewareConfig{}, counted(&runs)).Place(t.Context(), Ask{Keys: newKey()})
	r.is(t, codes.Unavailable, "IDEMPOTENCY_STORE_UNAVAILABLE")
	if r.waits(t); runs.Load() != 0 || strings.Contains(r.Status.String(), "refused") {
		t.Errorf("%v after %d runs", r.Status, runs.Load())
	}
	open := idempotency.MiddlewareConfig{FailOpen: func(r *http.Request) bool { return r.URL.Path == shopv1.Shop_PlaceOrder_FullMethodName }}
	r = o.serve(t, open, counted(&runs)).Place(t.Context(), Ask{Keys: newKey()})
	if r.is(t, codes.OK, ""); r.Header.Get("Idempotency-Bypassed") != "true" || runs.Load() != 1 {
		t.Errorf("%v after %d runs", r, runs.Load())
	}
}

func testScopeFails(t *testing.T, o once) {
	c := o.serve(t, idempotency.MiddlewareConfig{}, func(context.Context, *shopv1.PlaceOrderRequest, Set) (*shopv1.Order, error) {
		t.Error("the handler ran")
		return nil, nil
	})
	c.Place(t.Context(), Ask{Keys: newKey(), User: "nobody"}).is(t, codes.Internal, "INTERNAL")
}

// TestTakeover tests the key of a process that died.
func TestTakeover(t *testing.T, start Protocol) {
	const lease = 2 * time.Second
	for name, store := range Stores(t, lease) {
		if name == "memory" { // it dies with its process
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var runs atomic.Int64
			c := start(t, Setup{Store: store, Place: counted(&runs)})
			ask, begun := Ask{Keys: newKey()}, time.Now()
			claim := driver.NewClaim(driver.Key(idempotency.Key(ask.Keys[0]).In("ann")), driver.Fingerprint{})
			if out, err := store.Begin(t.Context(), claim); err != nil || out.State != driver.Acquired {
				t.Fatal(out, err)
			}
			busy := c.Place(t.Context(), ask)
			if time.Since(begun) < lease { // timing: a slow call finds the lease over
				busy.is(t, codes.Aborted, "IDEMPOTENCY_KEY_IN_USE")
			}
			for busy.code() == codes.Aborted && time.Since(begun) < Patience {
				retry, _ := detail[*errdetails.RetryInfo](busy)
				time.Sleep(min(retry.GetRetryDelay().AsDuration(), lease)) // timing: waits until the lease is over
				busy = c.Place(t.Context(), ask)
			}
			if busy.Order.GetId() != "order 1" || busy.replayed() {
				t.Errorf("after %v: %v", time.Since(begun), busy)
			}
			if again := c.Place(t.Context(), ask); again.Order.GetId() != "order 1" || !again.replayed() {
				t.Errorf("again: %v", again)
			}
		})
	}
}
