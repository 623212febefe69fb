package ratelimit_test

import (
	"context"
	"errors"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimittest"
)

// A second refund of one request would be of a unit that another one was charged.
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

// Replays beyond what the limit admits are charged, so that they are limited too.
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

// A limit of which ten times as much could not be counted is refunded all the same.
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

// Several middlewares are refunded together.
func TestRefundOfNestedMiddlewares(t *testing.T) {
	t.Parallel()
	l := ratelimittest.New()
	h := serve(t, l, byUser, func(w http.ResponseWriter, r *http.Request) {
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

// A client that has gone gets its unit back all the same, and once at most.
func TestRefundOfAClientThatHasGone(t *testing.T) {
	t.Parallel()
	m := newMemory(t)
	c := ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: 9, Window: 24 * time.Hour}}
	h := serve(t, uncertain{m}, charging(c), func(_ http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithCancel(r.Context())
		cancel()
		if err := ratelimit.RefundFrom(ctx); !errors.Is(err, ratelimit.ErrUnavailable) {
			t.Errorf("the refund says %v", err)
		}
		if err := ratelimit.RefundFrom(ctx); err != nil {
			t.Errorf("the second refund says %v", err)
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
