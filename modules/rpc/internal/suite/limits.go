package suite

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/shopv1"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimittest"
)

// TestLimits tests rate limits, in memory and on Redis. The cases are the ones of the HTTP
// middleware, and the ones specific to RPC.
func TestLimits(t *testing.T, start Protocol) {
	inMemory := func() (ratelimit.Limiter, error) { return ratelimit.NewMemory(ratelimit.MemoryConfig{}) }
	client, prefixes := redistest.New(t), atomic.Int64{}
	onRedis := func() (ratelimit.Limiter, error) {
		return ratelimitredis.New(client, ratelimitredis.Config{Prefix: fmt.Sprint("test", prefixes.Add(1)), Timeout: Patience})
	}
	for name, newLimiter := range map[string]func() (ratelimit.Limiter, error){"memory": inMemory, "Redis": onRedis} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testLimits(t, start, newLimiter)
		})
	}
}

func testLimits(t *testing.T, start Protocol, newLimiter func() (ratelimit.Limiter, error)) {
	for name, test := range map[string]func(t *testing.T, l limits){
		"unary calls":               testUnary,
		"streams at their start":    testStream,
		"a stream that is free":     testStreamRefund,
		"limits of a procedure":     testPerProcedure,
		"every violated limit":      testViolated,
		"a cost that never fits":    testNever,
		"charges that fail":         testNoCharges,
		"a limiter that is down":    testLimiterDown,
		"a shadow":                  testShadow,
		"the legacy headers":        testLegacy,
		"the replay of a key":       testRefund,
		"a handler that fails":      testFailedCall,
		"the address of the client": testAddress,
		"health":                    testHealthIsFree,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			limiter, err := newLimiter()
			if err != nil {
				t.Fatal(err)
			}
			test(t, limits{start, limiter})
		})
	}
}

type limits struct {
	start   Protocol
	limiter ratelimit.Limiter
}

var perUser = ratelimit.Limit{Name: "user", Max: 2}

// byUser charges every call to its user.
func byUser(r *http.Request) ([]ratelimit.Charge, error) {
	user, err := ratelimit.HeaderKey("X-User")(r)
	return []ratelimit.Charge{{Limit: perUser, Key: user}}, err
}

func (l limits) serve(t *testing.T, charges func(*http.Request) ([]ratelimit.Charge, error), cfg ratelimit.MiddlewareConfig) (Client, *atomic.Int64) {
	t.Helper()
	var runs atomic.Int64
	cfg.Logger = slog.New(slog.DiscardHandler)
	return l.start(t, Setup{Limiter: l.limiter, Charges: charges, Limits: cfg, Place: counted(&runs)}), &runs
}

func denied(t *testing.T, r Reply, limits ...string) {
	t.Helper()
	r.is(t, codes.ResourceExhausted, "")
	r.waits(t)
	info, _ := detail[*errdetails.ErrorInfo](r)
	quota, _ := detail[*errdetails.QuotaFailure](r)
	var violated []string
	for _, v := range quota.GetViolations() {
		violated = append(violated, v.GetSubject())
	}
	if info.GetReason() != "RATE_LIMITED" || strings.Join(violated, " ") != strings.Join(limits, " ") || r.Header.Get("RateLimit") == "" {
		t.Errorf("denied with %v and %v; want %v", r.Status, r.Header, limits)
	}
}

func testUnary(t *testing.T, l limits) {
	c, runs := l.serve(t, byUser, ratelimit.MiddlewareConfig{})
	first := c.Place(t.Context(), Ask{})
	if first.is(t, codes.OK, ""); first.Header.Get("RateLimit-Policy") != `"user";q=2;w=60` || !strings.HasPrefix(first.Header.Get("RateLimit"), `"user";r=1;t=`) {
		t.Errorf("first answer has %v", first.Header)
	}
	c.Place(t.Context(), Ask{}).is(t, codes.OK, "")
	denied(t, c.Place(t.Context(), Ask{}), "user")
	denied(t, c.Get(t.Context(), Ask{}), "user")
	if c.Place(t.Context(), Ask{User: "bob"}).is(t, codes.OK, ""); runs.Load() != 3 {
		t.Errorf("%d runs", runs.Load())
	}
}

func testStream(t *testing.T, l limits) {
	c, _ := l.serve(t, byUser, ratelimit.MiddlewareConfig{})
	for range 2 {
		r := c.Watch(t.Context(), Ask{})
		if r.is(t, codes.OK, ""); r.Header.Get("RateLimit") == "" {
			t.Errorf("a stream has %v", r.Header)
		}
	}
	denied(t, c.Watch(t.Context(), Ask{}), "user")
}

// testStreamRefund: a stream that turns out to be free refunds its unit.
func testStreamRefund(t *testing.T, l limits) {
	c := l.start(t, Setup{Limiter: l.limiter, Charges: byUser, Watch: ratelimit.RefundFrom})
	for n := range 5 {
		if r := c.Watch(t.Context(), Ask{}); r.code() != codes.OK {
			t.Errorf("stream %d: %v", n, r)
		}
	}
}

func testPerProcedure(t *testing.T, l limits) {
	c, _ := l.serve(t, func(r *http.Request) ([]ratelimit.Charge, error) {
		if r.Method != http.MethodPost {
			t.Errorf("method %s", r.Method)
		}
		if r.URL.Path != shopv1.Shop_PlaceOrder_FullMethodName {
			return nil, nil
		}
		return []ratelimit.Charge{{Limit: ratelimit.Limit{Name: "orders", Max: 1}}}, nil
	}, ratelimit.MiddlewareConfig{})
	c.Place(t.Context(), Ask{}).is(t, codes.OK, "")
	denied(t, c.Place(t.Context(), Ask{}), "orders")
	if r := c.Get(t.Context(), Ask{}); r.code() != codes.OK || r.Header.Get("RateLimit") != "" {
		t.Errorf("a free call got %v", r)
	}
}

func testViolated(t *testing.T, l limits) {
	c, _ := l.serve(t, func(*http.Request) ([]ratelimit.Charge, error) {
		return []ratelimit.Charge{{Limit: ratelimit.Limit{Name: "a", Max: 1}}, {Limit: ratelimit.Limit{Name: "b", Max: 9}}, {Limit: ratelimit.Limit{Name: "c", Max: 1}}}, nil
	}, ratelimit.MiddlewareConfig{})
	c.Place(t.Context(), Ask{}).is(t, codes.OK, "")
	denied(t, c.Place(t.Context(), Ask{}), "a", "c")
}

func testNever(t *testing.T, l limits) {
	c, _ := l.serve(t, func(*http.Request) ([]ratelimit.Charge, error) {
		return []ratelimit.Charge{{Limit: ratelimit.Limit{Name: "a", Max: 1}, Cost: 2}}, nil
	}, ratelimit.MiddlewareConfig{})
	r := c.Place(t.Context(), Ask{})
	r.is(t, codes.ResourceExhausted, "")
	if _, waits := detail[*errdetails.RetryInfo](r); waits {
		t.Errorf("%v has a time to wait", r.Status)
	}
}

func testNoCharges(t *testing.T, l limits) {
	broken, runs := l.serve(t, func(r *http.Request) ([]ratelimit.Charge, error) {
		if r.URL.Path == shopv1.Shop_GetOrder_FullMethodName {
			return nil, ratelimit.ErrNoKey
		}
		return nil, errors.New("secret")
	}, ratelimit.MiddlewareConfig{})
	broken.Get(t.Context(), Ask{}).is(t, codes.InvalidArgument, "RATE_LIMIT_KEY_REQUIRED")
	if r := broken.Place(t.Context(), Ask{}); r.code() != codes.Internal || strings.Contains(r.Status.String(), "secret") || runs.Load() != 0 {
		t.Errorf("got %v", r)
	}
}

func testLimiterDown(t *testing.T, l limits) {
	fake := ratelimittest.New()
	fake.Fail(ratelimit.ErrUnavailable)
	l.limiter = fake
	c, runs := l.serve(t, byUser, ratelimit.MiddlewareConfig{})
	r := c.Place(t.Context(), Ask{})
	r.is(t, codes.Unavailable, "RATE_LIMIT_UNAVAILABLE")
	if r.waits(t); runs.Load() != 0 {
		t.Errorf("%d runs", runs.Load())
	}
}

func testShadow(t *testing.T, l limits) {
	var would atomic.Int64
	c, _ := l.serve(t, byUser, ratelimit.MiddlewareConfig{Shadow: func(*http.Request, ratelimit.Decision) { would.Add(1) }})
	for range 4 {
		if r := c.Place(t.Context(), Ask{}); r.code() != codes.OK || r.Header.Get("RateLimit") != "" {
			t.Errorf("got %v", r)
		}
	}
	if would.Load() != 2 {
		t.Errorf("would have denied %d", would.Load())
	}
}

func testLegacy(t *testing.T, l limits) {
	c, _ := l.serve(t, byUser, ratelimit.MiddlewareConfig{LegacyHeaders: true})
	if r := c.Place(t.Context(), Ask{}); r.Header.Get("X-RateLimit-Limit") != "2" || r.Header.Get("X-RateLimit-Remaining") != "1" {
		t.Errorf("got %v", r.Header)
	}
}

// testRefund: a replay is free and marked as a replay.
func testRefund(t *testing.T, l limits) {
	var runs atomic.Int64
	c := l.start(t, Setup{
		Limiter: l.limiter, Charges: byUser, Place: counted(&runs),
		Store: idempotencytest.NewStore(),
		Once: idempotency.MiddlewareConfig{OnReplay: func(r *http.Request) {
			if err := ratelimit.RefundFrom(r.Context()); err != nil {
				t.Error(err)
			}
		}},
	})
	ask := Ask{Keys: newKey()}
	for n := range 5 {
		if r := c.Place(t.Context(), ask); r.code() != codes.OK || !strings.HasPrefix(r.Header.Get("RateLimit"), `"user";r=1;`) || r.replayed() != (n > 0) {
			t.Errorf("call %d got %v", n, r)
		}
	}
	c.Place(t.Context(), Ask{Keys: newKey()}).is(t, codes.OK, "")
	denied(t, c.Place(t.Context(), Ask{Keys: newKey()}), "user")
	if runs.Load() != 2 {
		t.Errorf("%d runs", runs.Load())
	}
}

// testFailedCall: a handler's failure reaches the client, and the call was charged.
func testFailedCall(t *testing.T, l limits) {
	c := l.start(t, Setup{Limiter: l.limiter, Charges: byUser, Place: func(context.Context, *shopv1.PlaceOrderRequest, Set) (*shopv1.Order, error) {
		return nil, Fail(codes.NotFound, "no such thing")
	}})
	r := c.Place(t.Context(), Ask{})
	if r.is(t, codes.NotFound, ""); r.Status.GetMessage() != "no such thing" || !strings.HasPrefix(r.Header.Get("RateLimit"), `"user";r=1;`) {
		t.Errorf("got %v", r)
	}
}

func testAddress(t *testing.T, l limits) {
	address, err := ratelimit.ClientIP(ratelimit.ClientIPConfig{})
	if err != nil {
		t.Fatal(err)
	}
	c, _ := l.serve(t, func(r *http.Request) ([]ratelimit.Charge, error) {
		key, err := address(r)
		if key != "127.0.0.1" {
			t.Errorf("the address is %q, %v", key, err)
		}
		return nil, err
	}, ratelimit.MiddlewareConfig{})
	c.Place(t.Context(), Ask{}).is(t, codes.OK, "")
	c.Watch(t.Context(), Ask{}).is(t, codes.OK, "")
}

// testHealthIsFree: health probes pass without a caller to charge, in any number.
func testHealthIsFree(t *testing.T, l limits) {
	for _, charges := range []func(*http.Request) ([]ratelimit.Charge, error){
		byUser,
		func(*http.Request) ([]ratelimit.Charge, error) {
			return []ratelimit.Charge{{Limit: perUser, Key: "all"}}, nil
		},
	} {
		c := l.start(t, Setup{Limiter: l.limiter, Charges: charges})
		for range perUser.Max + 1 {
			if err := c.Health(t.Context()); err != nil {
				t.Errorf("health: %v", err)
			}
		}
	}
}
