package ratelimit_test

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"

	"github.com/holdfast-go/holdfast/ratelimit"
)

// One limit that is charged for two keys is one item: the one nearest to its end.
func TestHeadersNameALimitOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		limit, n := ratelimit.Limit{Name: "account", Max: 3}, 0
		h := served(t, newMemory(t), func(*http.Request) ([]ratelimit.Charge, error) {
			n++
			return []ratelimit.Charge{{Limit: limit, Key: "from", Cost: int64(n % 2)}, {Limit: limit, Key: "to", Cost: 2}, {Limit: global}}, nil
		}, noContent, ratelimit.MiddlewareConfig{LegacyHeaders: true})
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

// A replay costs nothing, and its headers say so.
func TestHeadersAfterARefund(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := served(t, newMemory(t), byUser, func(w http.ResponseWriter, r *http.Request) {
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
				t.Errorf("a replay says %s, want %s", got, want)
			}
		}
		if got, want := call(h, http.MethodPost, "ann").Header().Get("RateLimit"), `"user";r=1;t=60, "global";r=999;t=60`; got != want {
			t.Errorf("afterwards got %s, want %s", got, want)
		}
	})
}
