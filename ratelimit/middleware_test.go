package ratelimit_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimittest"
)

var (
	perUser = ratelimit.Limit{Name: "user", Max: 2}
	global  = ratelimit.Limit{Name: "global", Max: 1000}
)

// byUser charges POST to the user and to the global limit; GET is free.
func byUser(r *http.Request) ([]ratelimit.Charge, error) {
	if r.Method == http.MethodGet {
		return nil, nil
	}
	user, err := ratelimit.HeaderKey("X-Mock-User-Id")(r)
	if err != nil {
		return nil, err
	}
	return []ratelimit.Charge{{Limit: perUser, Key: user}, {Limit: global}}, nil
}

func call(h http.Handler, method string, users ...string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(method, "/", nil)
	for _, user := range users {
		r.Header.Add("X-Mock-User-Id", user)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

// serve returns a handler behind middlewares, the first one outermost. Without configs it uses one middleware that
// logs nothing. Without a handler the answer is 204.
func serve(t *testing.T, l ratelimit.Limiter, charges func(*http.Request) ([]ratelimit.Charge, error), handler http.HandlerFunc, configs ...ratelimit.MiddlewareConfig) http.Handler {
	t.Helper()
	if len(configs) == 0 {
		configs = []ratelimit.MiddlewareConfig{{Logger: slog.New(slog.DiscardHandler)}}
	}
	if handler == nil {
		handler = func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }
	}
	var h http.Handler = handler
	for _, cfg := range slices.Backward(configs) {
		middleware, err := ratelimit.NewMiddleware(l, charges, cfg)
		if err != nil {
			t.Fatal(err)
		}
		h = middleware(h)
	}
	return h
}

func wantProblem(t *testing.T, w *httptest.ResponseRecorder, status int, code string) map[string]any {
	t.Helper()
	var body map[string]any
	if err := json.Unmarshal(w.Body.Bytes(), &body); err != nil {
		t.Errorf("body %q: %v", w.Body, err)
	}
	if w.Code != status || body["code"] != code || w.Header().Get("Content-Type") != "application/problem+json" {
		t.Errorf("got %d %v as %s, want %d %s", w.Code, body, w.Header().Get("Content-Type"), status, code)
	}
	return body
}

func TestMiddleware(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := serve(t, newMemory(t), byUser, nil)
		time.Sleep(15*time.Second + 300*time.Millisecond)
		w := call(h, http.MethodPost, "ann")
		if w.Code != http.StatusNoContent {
			t.Fatalf("got %d %s", w.Code, w.Body)
		}
		if got, want := w.Header().Get("RateLimit-Policy"), `"user";q=2;w=60, "global";q=1000;w=60`; got != want {
			t.Errorf("RateLimit-Policy is %s, want %s", got, want)
		}
		if got, want := w.Header().Get("RateLimit"), `"user";r=1;t=45, "global";r=999;t=45`; got != want {
			t.Errorf("RateLimit is %s, want %s", got, want)
		}
		call(h, http.MethodPost, "ann")
		w = call(h, http.MethodPost, "ann")
		body := wantProblem(t, w, http.StatusTooManyRequests, "RATE_LIMITED")
		if got := w.Header().Get("Retry-After"); got != "75" { // half of the two units must have lapsed
			t.Errorf("Retry-After is %s, want 75", got)
		}
		if got, want := w.Header().Get("RateLimit"), `"user";r=0;t=75, "global";r=998;t=45`; got != want {
			t.Errorf("RateLimit is %s, want %s", got, want)
		}
		if policies, ok := body["violated-policies"].([]any); !ok || len(policies) != 1 || policies[0] != "user" {
			t.Errorf("violated-policies is %v", body["violated-policies"])
		}
		if w := call(h, http.MethodPost, "bob"); w.Code != http.StatusNoContent {
			t.Errorf("another user got %d", w.Code)
		}
		if w := call(h, http.MethodGet); w.Code != http.StatusNoContent || w.Header().Get("RateLimit") != "" {
			t.Errorf("a free request got %d with %v", w.Code, w.Header())
		}
		time.Sleep(75 * time.Second)
		if w := call(h, http.MethodPost, "ann"); w.Code != http.StatusNoContent {
			t.Errorf("after Retry-After got %d", w.Code)
		}
	})
}

// maintenance is a user's own error with a code.
type maintenance struct{}

func (maintenance) Error() string             { return "in maintenance" }
func (maintenance) Code() string              { return "MAINTENANCE" }
func (maintenance) HTTPStatus() int           { return http.StatusServiceUnavailable }
func (maintenance) RetryAfter() time.Duration { return time.Minute }

func TestMiddlewareWithoutADecision(t *testing.T) {
	t.Parallel()
	for name, users := range map[string][]string{"none": nil, "empty": {""}, "two": {"a", "b"}} {
		w := call(serve(t, ratelimittest.New(), byUser, nil), http.MethodPost, users...)
		if w.Code != http.StatusBadRequest {
			t.Errorf("%s: got %d", name, w.Code)
		}
		wantProblem(t, w, http.StatusBadRequest, "RATE_LIMIT_KEY_REQUIRED")
	}

	down := ratelimittest.New()
	down.Fail(ratelimit.ErrUnavailable)
	w := call(serve(t, down, byUser, nil), http.MethodPost, "ann")
	wantProblem(t, w, http.StatusServiceUnavailable, "RATE_LIMIT_UNAVAILABLE")
	if w.Header().Get("Retry-After") != "1" {
		t.Errorf("Retry-After is %q", w.Header().Get("Retry-After"))
	}

	broken := func(*http.Request) ([]ratelimit.Charge, error) { return nil, errors.New("secret detail") }
	w = call(serve(t, ratelimittest.New(), broken, nil), http.MethodPost, "ann")
	wantProblem(t, w, http.StatusInternalServerError, "INTERNAL")
	if strings.Contains(w.Body.String(), "secret") {
		t.Errorf("the answer is %s", w.Body)
	}

	unmetered := ratelimittest.New()
	unmetered.Next(ratelimit.Decision{Allowed: true, Fallback: true}, nil)
	if w := call(serve(t, unmetered, byUser, nil), http.MethodPost, "ann"); w.Code != http.StatusNoContent || w.Header().Get("RateLimit") != "" {
		t.Errorf("an unmetered request got %d with %v", w.Code, w.Header())
	}

	never := ratelimittest.New()
	never.Next(ratelimit.Decision{Denied: "user", Never: true}, nil)
	w = call(serve(t, never, byUser, nil), http.MethodPost, "ann")
	wantProblem(t, w, http.StatusTooManyRequests, "RATE_LIMITED")
	if w.Header().Get("Retry-After") != "" {
		t.Errorf("Retry-After is %q for an impossible charge", w.Header().Get("Retry-After"))
	}

	late := func(*http.Request) ([]ratelimit.Charge, error) { return nil, fmt.Errorf("plans: %w", maintenance{}) }
	w = call(serve(t, ratelimittest.New(), late, nil), http.MethodPost, "ann")
	wantProblem(t, w, http.StatusServiceUnavailable, "MAINTENANCE")
	if w.Header().Get("Retry-After") != "60" {
		t.Errorf("Retry-After is %q", w.Header().Get("Retry-After"))
	}

	if _, err := ratelimit.NewMiddleware(nil, nil, ratelimit.MiddlewareConfig{}); err == nil ||
		!strings.Contains(err.Error(), "limiter") || !strings.Contains(err.Error(), "charges") {
		t.Errorf("NewMiddleware returned %v", err)
	}
}

func TestShadow(t *testing.T) {
	t.Parallel()
	var would []string
	shadow := ratelimit.MiddlewareConfig{Shadow: func(_ *http.Request, d ratelimit.Decision) { would = append(would, d.Denied) }}
	h := serve(t, newMemory(t), byUser, nil, shadow)
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
	if w := call(serve(t, down, byUser, nil, shadow), http.MethodPost, "ann"); w.Code != http.StatusNoContent {
		t.Errorf("without a store a request got %d", w.Code)
	}
}

// The limits of a request depend on its route and on the user's plan, and a new plan takes effect at once.
func TestLimitsPerRequest(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		plans := map[string]int64{"ann": 1, "bob": 3}
		h := serve(t, newMemory(t), func(r *http.Request) ([]ratelimit.Charge, error) {
			user := r.Header.Get("X-Mock-User-Id")
			c := ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: plans[user]}, Key: user}
			if r.Method == http.MethodPut {
				c.Cost = 2
			}
			return []ratelimit.Charge{c}, nil
		}, nil)
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
			w := call(h, step.method, step.user)
			if w.Code != step.want {
				t.Errorf("%s by %s got %d, want %d", step.method, step.user, w.Code, step.want)
			}
			never := step.user == "ann" && step.method == http.MethodPut
			if w.Code == http.StatusTooManyRequests && (w.Header().Get("Retry-After") == "") != never {
				t.Errorf("%s by %s got Retry-After %q", step.method, step.user, w.Header().Get("Retry-After"))
			}
		}
		plans["ann"] = 3
		if w := call(h, http.MethodPut, "ann"); w.Code != http.StatusNoContent {
			t.Errorf("on the better plan got %d", w.Code)
		}
	})
}

func TestDeniedNamesEveryViolatedLimit(t *testing.T) {
	t.Parallel()
	m := newMemory(t)
	both := func(*http.Request) ([]ratelimit.Charge, error) {
		return []ratelimit.Charge{{Limit: ratelimit.Limit{Name: "a", Max: 1}}, {Limit: ratelimit.Limit{Name: "b", Max: 1}}, {Limit: ratelimit.Limit{Name: "c", Max: 9}}}, nil
	}
	h := serve(t, m, both, nil)
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

// If a store is down, the log does not get a line for each request.
func TestOutageIsLoggedSeldom(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		down := ratelimittest.New()
		h := serve(t, down, byUser, func(http.ResponseWriter, *http.Request) {}, ratelimit.MiddlewareConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))})
		for range 1000 {
			down.Fail(ratelimit.ErrUnavailable)
			if w := call(h, http.MethodPost, "ann"); w.Code != http.StatusServiceUnavailable {
				t.Fatalf("got %d", w.Code)
			}
			time.Sleep(25 * time.Millisecond)
		}
		if n := strings.Count(log.String(), "\n"); n != 3 || !strings.Contains(log.String(), "repeats=399") {
			t.Errorf("25 seconds of outage are %d lines, want 3 with the number of skipped lines:\n%s", n, log.String())
		}
	})
}

// A limit charged for two keys is one item: the one with fewer units left.
func TestHeadersNameALimitOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		limit, n := ratelimit.Limit{Name: "account", Max: 3}, 0
		h := serve(t, newMemory(t), func(*http.Request) ([]ratelimit.Charge, error) {
			n++
			return []ratelimit.Charge{{Limit: limit, Key: "from", Cost: int64(n % 2)}, {Limit: limit, Key: "to", Cost: 2}, {Limit: global}}, nil
		}, nil, ratelimit.MiddlewareConfig{LegacyHeaders: true})
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

// A replay costs nothing, and its headers show that.
func TestHeadersAfterARefund(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := serve(t, newMemory(t), byUser, func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Replay") != "" {
				if err := ratelimit.RefundFrom(r.Context()); err != nil {
					t.Error(err)
				}
			}
			w.WriteHeader(http.StatusOK)
		}, ratelimit.MiddlewareConfig{LegacyHeaders: true})
		for range 3 {
			r := httptest.NewRequest(http.MethodPost, "/", nil)
			r.Header.Set("X-Mock-User-Id", "ann")
			r.Header.Set("Replay", "yes")
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			if got, want := w.Header().Get("RateLimit"), `"user";r=2;t=60, "global";r=1000;t=60`; got != want || w.Header().Get("X-RateLimit-Remaining") != "2" {
				t.Errorf("a replay has %s, want %s", got, want)
			}
		}
		if got, want := call(h, http.MethodPost, "ann").Header().Get("RateLimit"), `"user";r=1;t=60, "global";r=999;t=60`; got != want {
			t.Errorf("afterwards got %s, want %s", got, want)
		}
	})
}

// A second refund of one request would return a unit of another request.
func TestSecondRefundChangesNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := serve(t, newMemory(t), byUser, func(w http.ResponseWriter, r *http.Request) {
			for n := 0; n < 2 && r.Method == http.MethodPut; n++ {
				if err := ratelimit.RefundFrom(r.Context()); err != nil {
					t.Error(err)
				}
			}
			w.WriteHeader(http.StatusNoContent)
		})
		for n := range perUser.Max + 1 {
			if n == perUser.Max/2 {
				call(h, http.MethodPut, "ann")
			}
			want := http.StatusNoContent
			if n == perUser.Max {
				want = http.StatusTooManyRequests
			}
			if w := call(h, http.MethodPost, "ann"); w.Code != want {
				t.Errorf("request %d got %d, want %d", n+1, w.Code, want)
			}
		}
	})
}

// Replays beyond ten times the limit are charged, so that they are limited too.
func TestRefundsAreBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := newMemory(t)
		limit := ratelimit.Limit{Name: "user", Max: 2, Algorithm: ratelimit.FixedWindow}
		h := serve(t, m, func(r *http.Request) ([]ratelimit.Charge, error) {
			return []ratelimit.Charge{{Limit: limit, Key: r.Header.Get("X-Mock-User-Id")}}, nil
		}, func(w http.ResponseWriter, r *http.Request) {
			if err := ratelimit.RefundFrom(r.Context()); err != nil {
				t.Error(err)
			}
			w.WriteHeader(http.StatusNoContent)
		})
		for minute := range 2 {
			replayed := map[string]int{}
			for n := range 100 {
				user := []string{"ann", "bob"}[n%2]
				if call(h, http.MethodPost, user).Code == http.StatusNoContent {
					replayed[user]++
				}
			}
			if replayed["ann"] != 22 || replayed["bob"] != 22 {
				t.Errorf("minute %d: %v replays went through, want 20 free and 2 charged for each user", minute, replayed)
			}
			time.Sleep(time.Minute)
		}
	})
}

func charging(charges ...ratelimit.Charge) func(*http.Request) ([]ratelimit.Charge, error) {
	return func(*http.Request) ([]ratelimit.Charge, error) { return charges, nil }
}

// A limit is refunded even if ten times its Max cannot be counted exactly.
func TestRefundOfTheLargestLimit(t *testing.T) {
	t.Parallel()
	c := ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: 1 << 35, Algorithm: ratelimit.TokenBucket}}
	m := newMemory(t)
	h := serve(t, m, charging(c), func(_ http.ResponseWriter, r *http.Request) {
		if err := ratelimit.RefundFrom(r.Context()); err != nil {
			t.Error(err)
		}
	})
	call(h, http.MethodPost)
	if d, err := m.Peek(t.Context(), c); err != nil || d.Limits()[0].Remaining != c.Limit.Max-1 {
		t.Errorf("%v, %v, want all but the one peeked at", d.Limits(), err)
	}
}

// The charges of several middlewares are refunded together.
func TestRefundOfNestedMiddlewares(t *testing.T) {
	t.Parallel()
	l := ratelimittest.New()
	h := serve(t, l, byUser, func(w http.ResponseWriter, r *http.Request) {
		for range 2 { // the second call does nothing
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

// A client that has disconnected still gets its unit back, but only once.
func TestRefundOfAClientThatHasGone(t *testing.T) {
	t.Parallel()
	m := newMemory(t)
	c := ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: 9, Window: 24 * time.Hour}}
	h := serve(t, uncertain{m}, charging(c), func(_ http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithCancel(r.Context())
		cancel()
		if err := ratelimit.RefundFrom(ctx); !errors.Is(err, ratelimit.ErrUnavailable) {
			t.Errorf("the refund returned %v", err)
		}
		if err := ratelimit.RefundFrom(ctx); err != nil {
			t.Errorf("the second refund returned %v", err)
		}
	})
	if err := ratelimit.RefundFrom(t.Context()); err != nil {
		t.Errorf("outside the middleware: %v", err)
	}
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
