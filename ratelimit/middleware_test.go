package ratelimit_test

import (
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

func TestReplayIsRefunded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := serve(t, newMemory(t), byUser, func(w http.ResponseWriter, r *http.Request) {
			if charges, ok := ratelimit.ChargesFrom(r.Context()); !ok || len(charges) != 2 {
				t.Errorf("charged %v, %v", charges, ok)
			}
			for range 2 { // twice is once
				if err := ratelimit.RefundFrom(r.Context()); err != nil {
					t.Error(err)
				}
			}
			w.WriteHeader(http.StatusNoContent)
		})
		for n := range 10 {
			if w := call(h, http.MethodPost, "ann"); w.Code != http.StatusNoContent {
				t.Fatalf("replay %d got %d", n, w.Code)
			}
		}
	})
	if err := ratelimit.RefundFrom(context.Background()); err != nil {
		t.Errorf("outside the middleware: %v", err)
	}
	if _, ok := ratelimit.ChargesFrom(context.Background()); ok {
		t.Error("charges outside the middleware")
	}
}
