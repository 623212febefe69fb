package ratelimit_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/holdfast-go/holdfast/ratelimit"
)

// With several processes, use ratelimitredis.New instead of NewMemory.
func Example() {
	limiter, err := ratelimit.NewMemory(ratelimit.MemoryConfig{})
	if err != nil {
		panic(err)
	}
	user := ratelimit.Limit{Name: "user", Max: 2, Window: time.Hour}
	global := ratelimit.Limit{Name: "global", Max: 3, Window: time.Hour}
	ask := func(id string) {
		d, err := limiter.Allow(context.Background(), ratelimit.Charge{Limit: user, Key: id}, ratelimit.Charge{Limit: global})
		if err != nil {
			panic(err)
		}
		fmt.Printf("%s: allowed %v, denied by %q\n", id, d.Allowed, d.Denied)
	}
	ask("ann")
	ask("ann")
	ask("ann") // denied, and not charged to the others
	ask("bob")
	ask("cleo")
	// Output:
	// ann: allowed true, denied by ""
	// ann: allowed true, denied by ""
	// ann: allowed false, denied by "user"
	// bob: allowed true, denied by ""
	// cleo: allowed false, denied by "global"
}

func ExampleNewMiddleware() {
	limiter, err := ratelimit.NewMemory(ratelimit.MemoryConfig{})
	if err != nil {
		panic(err)
	}
	userID := ratelimit.HeaderKey("X-User-Id") // set by the authentication
	limit := ratelimit.Limit{Name: "user", Max: 1, Window: time.Hour}
	charges := func(r *http.Request) ([]ratelimit.Charge, error) {
		id, err := userID(r)
		return []ratelimit.Charge{{Limit: limit, Key: id}}, err
	}
	middleware, err := ratelimit.NewMiddleware(limiter, charges, ratelimit.MiddlewareConfig{})
	if err != nil {
		panic(err)
	}
	handler := middleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "done") }))
	for range 2 {
		r := httptest.NewRequest(http.MethodPost, "/orders", nil)
		r.Header.Set("X-User-Id", "42")
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		fmt.Println(w.Code, w.Header().Get("RateLimit-Policy"))
	}
	// Output:
	// 200 "user";q=1;w=3600
	// 429 "user";q=1;w=3600
}

func ExampleNewWaiter() {
	limiter, err := ratelimit.NewMemory(ratelimit.MemoryConfig{})
	if err != nil {
		panic(err)
	}
	// 100 calls a minute for all workers together, at most two at once.
	calls := ratelimit.Limit{Name: "calls", Max: 100, Algorithm: ratelimit.TokenBucket, Burst: 2}
	waiter, err := ratelimit.NewWaiter(limiter, []ratelimit.Charge{{Limit: calls}}, ratelimit.WaiterConfig{})
	if err != nil {
		panic(err)
	}
	start := time.Now()
	for range 3 {
		if err := waiter.Wait(context.Background()); err != nil {
			panic(err)
		}
	}
	fmt.Println("the third waited:", time.Since(start) > 500*time.Millisecond) // timing: shows that a caller waited, without an upper limit
	// Output:
	// the third waited: true
}

// Tokens are reserved now, and the call is made when they are available.
func ExampleWaiter_Reserve() {
	limiter, err := ratelimit.NewMemory(ratelimit.MemoryConfig{})
	if err != nil {
		panic(err)
	}
	calls := ratelimit.Limit{Name: "calls", Max: 1, Algorithm: ratelimit.TokenBucket} // one a minute
	waiter, err := ratelimit.NewWaiter(limiter, []ratelimit.Charge{{Limit: calls}}, ratelimit.WaiterConfig{})
	if err != nil {
		panic(err)
	}
	for range 2 {
		r, err := waiter.Reserve(context.Background(), 5*time.Minute)
		if err != nil {
			panic(err)
		}
		fmt.Println("after", r.Delay.Round(time.Minute))
	}
	_, err = waiter.Reserve(context.Background(), time.Second)
	fmt.Println(errors.Is(err, ratelimit.ErrWaitTooLong))
	// Output:
	// after 0s
	// after 1m0s
	// true
}

// A denial is an error with a code and a status for the client.
func ExampleDecision_Err() {
	limiter, err := ratelimit.NewMemory(ratelimit.MemoryConfig{})
	if err != nil {
		panic(err)
	}
	exports := ratelimit.Charge{Limit: ratelimit.Limit{Name: "exports", Max: 1, Window: 24 * time.Hour}, Key: "acme"}
	for range 2 {
		d, err := limiter.Allow(context.Background(), exports)
		if err != nil {
			panic(err)
		}
		err = d.Err()
		if coded, ok := errors.AsType[interface {
			error
			Code() string
			HTTPStatus() int
		}](err); ok {
			fmt.Println(coded.HTTPStatus(), coded.Code())
		} else {
			fmt.Println(err)
		}
	}
	// Output:
	// <nil>
	// 429 RATE_LIMITED
}
