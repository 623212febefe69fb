package idempotency_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
)

func TestDeniedHeadersAreNeverReplayed(t *testing.T) {
	t.Parallel()
	denied := []string{
		"Set-Cookie", "Date", "Connection", "Keep-Alive", "Transfer-Encoding", "Trailer", "Upgrade", "Www-Authenticate",
		"Access-Control-Allow-Origin", "Ratelimit-Remaining", "X-Ratelimit-Reset", "Retry-After", "Authorization",
	}
	for _, name := range denied {
		_, err := idempotency.NewMiddleware(idempotencytest.NewStore(), idempotency.UnsafeGlobalScope, idempotency.MiddlewareConfig{
			KeepHeaders: []string{"Location", strings.ToLower(name)},
		})
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("KeepHeaders with %s: %v", name, err)
		}
	}

	if clean := driver.CleanHeader(http.Header{"Idempotency-Replayed": {"true"}, "Location": {"/1"}}); len(clean) != 1 {
		t.Errorf("CleanHeader leaves %v", clean)
	}

	// A record that another system wrote may hold anything.
	store, header := idempotencytest.NewStore(), http.Header{"Location": {"/1"}}
	for _, name := range denied {
		header[name] = []string{"x"}
	}
	h := protect(t, store, idempotency.MiddlewareConfig{}, func(_ http.ResponseWriter, r *http.Request) {
		claim, _ := driver.ClaimFrom(r.Context())
		claim.Settle(driver.BeginResult{
			State: driver.Completed, Fingerprint: claim.Fingerprint,
			Response: driver.Response{Status: 201, Header: header},
		}, false)
	})
	for range 2 {
		rec := send(h, post(goodKey, nil))
		if rec.Code != 201 || rec.Header().Get("Location") != "/1" {
			t.Errorf("%d %v", rec.Code, rec.Header())
		}
		for _, name := range denied {
			if rec.Header().Get(name) != "" {
				t.Errorf("%s was sent", name)
			}
		}
	}
}

func TestKeepHeadersOfYourOwn(t *testing.T) {
	t.Parallel()
	h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{KeepHeaders: []string{"x-order"}},
		func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X-Order", "1")
			w.Header().Set("Location", "/1")
		})
	send(h, post(goodKey, nil))
	again := send(h, post(goodKey, nil)).Header()
	if again.Get("X-Order") != "1" || again.Get("Location") != "" {
		t.Errorf("replayed headers %v", again)
	}
}

// A header that is allowed twice does not let another one through.
func TestKeepHeadersNamedTwice(t *testing.T) {
	t.Parallel()
	h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{KeepHeaders: []string{"Location", "location"}},
		func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Location", "/1")
			w.Header().Set("X-Session", "secret")
		})
	for _, want := range []string{"secret", ""} {
		if got := send(h, post(goodKey, nil)).Header(); got.Get("X-Session") != want || got.Get("Location") != "/1" {
			t.Errorf("header %v; want X-Session %q", got, want)
		}
	}
}
