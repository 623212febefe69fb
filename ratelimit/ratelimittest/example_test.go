package ratelimittest_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimittest"
)

// A test scripts the answers of a limiter, and checks the charges.
func Example() {
	limiter := ratelimittest.New()
	charges := func(r *http.Request) ([]ratelimit.Charge, error) {
		return []ratelimit.Charge{{Limit: ratelimit.Limit{Name: "user", Max: 10}, Key: r.Header.Get("X-User-Id")}}, nil
	}
	limited, err := ratelimit.NewMiddleware(limiter, charges, ratelimit.MiddlewareConfig{})
	if err != nil {
		panic(err)
	}
	handler := limited(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }))
	post := func() *httptest.ResponseRecorder {
		r := httptest.NewRequest(http.MethodPost, "/orders", nil)
		r.Header.Set("X-User-Id", "ann")
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		return w
	}

	limiter.Deny("user", 30*time.Second)
	fmt.Println(post().Code, "charged:", len(limiter.Charged()))
	limiter.Fail(ratelimit.ErrUnavailable)
	fmt.Println(post().Code, "charged:", len(limiter.Charged()))
	fmt.Println(post().Code, "charged:", len(limiter.Charged()), "to", limiter.Charged()[0][0].Key)
	// Output:
	// 429 charged: 0
	// 503 charged: 0
	// 204 charged: 1 to ann
}
