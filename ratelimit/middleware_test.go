package ratelimit_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
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

// byUser charges POST to the user and to all; GET is free.
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

func serve(t *testing.T, l ratelimit.Limiter, charges func(*http.Request) ([]ratelimit.Charge, error), handler http.HandlerFunc) http.Handler {
	t.Helper()
	middleware, err := ratelimit.NewMiddleware(l, ratelimit.MiddlewareConfig{Charges: charges, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	if handler == nil {
		handler = func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusNoContent) }
	}
	return middleware(handler)
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
		if got := w.Header().Get("Retry-After"); got != "75" { // half of the two must have lapsed
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
		t.Errorf("the answer tells %s", w.Body)
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
		t.Errorf("Retry-After is %q for what will never be", w.Header().Get("Retry-After"))
	}

	if _, err := ratelimit.NewMiddleware(nil, ratelimit.MiddlewareConfig{RetryUnavailable: -1}); err == nil ||
		!strings.Contains(err.Error(), "limiter") || !strings.Contains(err.Error(), "Charges") || !strings.Contains(err.Error(), "RetryUnavailable") {
		t.Errorf("NewMiddleware says %v", err)
	}
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

// A store that is down does not fill the log with a line for each request.
func TestOutageIsLoggedSeldom(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		down := ratelimittest.New()
		h := served(t, down, func(http.ResponseWriter, *http.Request) {}, ratelimit.MiddlewareConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))})
		for range 1000 {
			down.Fail(ratelimit.ErrUnavailable)
			if w := call(h, http.MethodPost, "ann"); w.Code != http.StatusServiceUnavailable {
				t.Fatalf("got %d", w.Code)
			}
			time.Sleep(25 * time.Millisecond)
		}
		if n := strings.Count(log.String(), "\n"); n != 3 || !strings.Contains(log.String(), "repeats=399") {
			t.Errorf("25 seconds of outage are %d lines, want 3 that say how many were left out:\n%s", n, log.String())
		}
	})
}
