package ratelimit_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimittest"
)

// served returns a handler behind middlewares, the first one outermost.
func served(t *testing.T, l ratelimit.Limiter, handler http.HandlerFunc, configs ...ratelimit.MiddlewareConfig) http.Handler {
	t.Helper()
	var h http.Handler = handler
	for i := len(configs) - 1; i >= 0; i-- {
		if configs[i].Charges == nil {
			configs[i].Charges = byUser
		}
		middleware, err := ratelimit.NewMiddleware(l, configs[i])
		if err != nil {
			t.Fatal(err)
		}
		h = middleware(h)
	}
	return h
}

func noContent(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }

func TestHeaderFormats(t *testing.T) {
	t.Parallel()
	for format, want := range map[ratelimit.Headers][2]string{
		ratelimit.HeadersDraft10: {`"user";r=1;t=60, "global";r=999;t=60`, ""},
		ratelimit.HeadersLegacy:  {"", "2 1 60"},
		ratelimit.HeadersBoth:    {`"user";r=1;t=60, "global";r=999;t=60`, "2 1 60"},
		ratelimit.HeadersNone:    {"", ""},
	} {
		synctest.Test(t, func(t *testing.T) {
			h := served(t, newMemory(t), noContent, ratelimit.MiddlewareConfig{Headers: format})
			got := call(h, http.MethodPost, "ann").Header()
			legacy := got.Get("X-RateLimit-Limit")
			if legacy != "" {
				legacy += " " + got.Get("X-RateLimit-Remaining") + " " + got.Get("X-RateLimit-Reset")
			}
			if got.Get("RateLimit") != want[0] || legacy != want[1] {
				t.Errorf("format %d: got %v", format, got)
			}
			call(h, http.MethodPost, "ann")
			if w := call(h, http.MethodPost, "ann"); w.Code != http.StatusTooManyRequests || w.Header().Get("Retry-After") == "" {
				t.Errorf("format %d: a denial is %d with %v", format, w.Code, w.Header())
			}
		})
	}
	if _, err := ratelimit.NewMiddleware(newMemory(t), ratelimit.MiddlewareConfig{Charges: byUser, Headers: 9}); err == nil {
		t.Error("accepted an unknown format")
	}
}

// One limit that is charged for two keys is one item: the one nearest to its end.
func TestHeadersNameALimitOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		limit, n := ratelimit.Limit{Name: "account", Max: 3}, 0
		h := served(t, newMemory(t), noContent, ratelimit.MiddlewareConfig{Charges: func(*http.Request) ([]ratelimit.Charge, error) {
			n++
			return []ratelimit.Charge{{Limit: limit, Key: "from", Cost: int64(n % 2)}, {Limit: limit, Key: "to", Cost: 2}, {Limit: global}}, nil
		}, Headers: ratelimit.HeadersBoth})
		got := call(h, http.MethodPost).Header()
		if got.Get("RateLimit") != `"account";r=1;t=60, "global";r=999;t=60` || got.Get("RateLimit-Policy") != `"account";q=3;w=60, "global";q=1000;w=60` {
			t.Errorf("got %v", got)
		}
		got = call(h, http.MethodPost).Header()
		if got.Get("RateLimit") != `"account";r=1;t=90, "global";r=999;t=60` || got.Get("X-RateLimit-Reset") != "90" {
			t.Errorf("denied: got %v", got)
		}
	})
}

func TestShadow(t *testing.T) {
	t.Parallel()
	var would []string
	shadow := ratelimit.MiddlewareConfig{Shadow: func(_ *http.Request, d ratelimit.Decision) { would = append(would, d.Denied) }}
	h := served(t, newMemory(t), noContent, shadow)
	for n := range 4 {
		if w := call(h, http.MethodPost, "ann"); w.Code != http.StatusNoContent || len(w.Header()) != 0 {
			t.Errorf("request %d got %d with %v", n, w.Code, w.Header())
		}
	}
	if len(would) != 2 || would[0] != "user" {
		t.Errorf("would have denied %v, want user twice", would)
	}
	if w := call(h, http.MethodPost); w.Code != http.StatusNoContent {
		t.Errorf("a request without a key got %d", w.Code)
	}
	down := ratelimittest.New()
	down.Fail(ratelimit.ErrUnavailable)
	if w := call(served(t, down, noContent, shadow), http.MethodPost, "ann"); w.Code != http.StatusNoContent {
		t.Errorf("without a store a request got %d", w.Code)
	}
}

// A replay costs nothing, and its headers say so.
func TestHeadersAfterARefund(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := served(t, newMemory(t), func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Replay") != "" {
				if err := ratelimit.RefundFrom(r.Context()); err != nil {
					t.Error(err)
				}
			}
			w.WriteHeader(http.StatusOK)
		}, ratelimit.MiddlewareConfig{Headers: ratelimit.HeadersBoth})
		for range 3 {
			r := httptest.NewRequest(http.MethodPost, "/", nil)
			r.Header.Set("X-Mock-User-Id", "ann")
			r.Header.Set("Replay", "yes")
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			if got, want := w.Header().Get("RateLimit"), `"user";r=2;t=60, "global";r=1000;t=60`; got != want || w.Header().Get("X-RateLimit-Remaining") != "2" {
				t.Errorf("a replay says %s, want %s", got, want)
			}
		}
		if got, want := call(h, http.MethodPost, "ann").Header().Get("RateLimit"), `"user";r=1;t=60, "global";r=999;t=60`; got != want {
			t.Errorf("afterwards got %s, want %s", got, want)
		}
	})
}

// Several middlewares are refunded together.
func TestRefundOfNestedMiddlewares(t *testing.T) {
	t.Parallel()
	l := ratelimittest.New()
	h := served(t, l, func(w http.ResponseWriter, r *http.Request) {
		for range 2 { // twice is once
			if err := ratelimit.RefundFrom(r.Context()); err != nil {
				t.Error(err)
			}
		}
	}, ratelimit.MiddlewareConfig{}, ratelimit.MiddlewareConfig{Shadow: func(*http.Request, ratelimit.Decision) {}})
	call(h, http.MethodPost, "ann")
	if n := len(l.Refunded()); n != 2 {
		t.Errorf("%d refunds, want one for each middleware", n)
	}
}

// The limits of a request depend on its route and on the plan of its user, and a
// new plan takes effect at once.
func TestLimitsPerRequest(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		plans := map[string]int64{"ann": 1, "bob": 3}
		var decisions []ratelimit.Decision
		h := served(t, newMemory(t), noContent, ratelimit.MiddlewareConfig{
			Charges: func(r *http.Request) ([]ratelimit.Charge, error) {
				user := r.Header.Get("X-Mock-User-Id")
				c := ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: plans[user]}, Key: user}
				if r.Method == http.MethodPut {
					c.Cost = 2
				}
				return []ratelimit.Charge{c}, nil
			},
			OnDecision: func(_ *http.Request, d ratelimit.Decision) { decisions = append(decisions, d) },
		})
		for _, step := range []struct {
			method, user string
			want         int
		}{
			{http.MethodPost, "ann", 204},
			{http.MethodPost, "ann", 429},
			{http.MethodPut, "ann", 429},
			{http.MethodPut, "bob", 204},
			{http.MethodPut, "bob", 429},
			{http.MethodPost, "bob", 204},
		} {
			if w := call(h, step.method, step.user); w.Code != step.want {
				t.Errorf("%s by %s got %d, want %d", step.method, step.user, w.Code, step.want)
			}
		}
		plans["ann"] = 3
		if w := call(h, http.MethodPut, "ann"); w.Code != http.StatusNoContent {
			t.Errorf("on the better plan got %d", w.Code)
		}
		if len(decisions) != 7 || !decisions[2].Never {
			t.Errorf("saw %+v", decisions)
		}
	})
}

func TestDeniedNamesEveryViolatedLimit(t *testing.T) {
	t.Parallel()
	m := newMemory(t)
	both := func(*http.Request) ([]ratelimit.Charge, error) {
		return []ratelimit.Charge{{Limit: ratelimit.Limit{Name: "a", Max: 1}}, {Limit: ratelimit.Limit{Name: "b", Max: 1}}, {Limit: ratelimit.Limit{Name: "c", Max: 9}}}, nil
	}
	h := served(t, m, noContent, ratelimit.MiddlewareConfig{Charges: both})
	call(h, http.MethodPost)
	body := wantProblem(t, call(h, http.MethodPost), http.StatusTooManyRequests, "RATE_LIMITED")
	if got, ok := body["violated-policies"].([]any); !ok || len(got) != 2 || got[0] != "a" || got[1] != "b" {
		t.Errorf("violated-policies is %v", body["violated-policies"])
	}
	if body["type"] != "https://iana.org/assignments/http-problem-types#quota-exceeded" {
		t.Errorf("type is %v", body["type"])
	}
	if err := ratelimit.RefundFrom(context.Background()); err != nil {
		t.Error(err)
	}
}

// A client that has gone gets its unit back all the same, and once at most.
func TestRefundOfAClientThatHasGone(t *testing.T) {
	t.Parallel()
	m := newMemory(t)
	c := ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: 9, Window: 24 * time.Hour}}
	h := served(t, uncertain{m}, func(_ http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithCancel(r.Context())
		cancel()
		if err := ratelimit.RefundFrom(ctx); !errors.Is(err, ratelimit.ErrUnavailable) {
			t.Errorf("the refund says %v", err)
		}
		if err := ratelimit.RefundFrom(ctx); err != nil {
			t.Errorf("the second refund says %v", err)
		}
	}, ratelimit.MiddlewareConfig{Charges: func(*http.Request) ([]ratelimit.Charge, error) { return []ratelimit.Charge{c}, nil }})
	for range 2 {
		if _, err := m.Allow(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	call(h, http.MethodPost)
	if d, err := m.Peek(t.Context(), c); err != nil || d.Limits()[0].Remaining != 6 {
		t.Errorf("%v, %v, want 6 left beside the one peeked at", d.Limits(), err)
	}
}
