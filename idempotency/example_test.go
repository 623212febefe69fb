package idempotency_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
)

// A handler in one line: a second request with the key does not run it.
func ExampleNewMiddleware() {
	store := idempotencytest.NewStore() // idempotencyredis.NewStore in production
	tenant := func(r *http.Request) (string, error) { return r.Header.Get("X-Tenant"), nil }
	protect, err := idempotency.NewMiddleware(store, tenant, idempotency.MiddlewareConfig{})
	if err != nil {
		fmt.Println(err)
		return
	}
	payments := 0
	handler := protect(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		payments++
		w.WriteHeader(http.StatusCreated)
		fmt.Fprintf(w, "payment %d", payments)
	}))

	post := func(key, body string) {
		r := httptest.NewRequest(http.MethodPost, "/payments", strings.NewReader(body))
		r.Header.Set("X-Tenant", "acme")
		r.Header.Set("Idempotency-Key", key)
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		fmt.Printf("%d replayed=%q %s\n", w.Code, w.Header().Get("Idempotency-Replayed"), w.Body)
	}
	post("a0eebc999c0b4ef8bb6d6bb9bd380a11", "10 EUR")
	post("a0eebc999c0b4ef8bb6d6bb9bd380a11", "10 EUR")
	post("a0eebc999c0b4ef8bb6d6bb9bd380a11", "99 EUR")
	// Output:
	// 201 replayed="" payment 1
	// 201 replayed="true" payment 1
	// 422 replayed="" {"code":"IDEMPOTENCY_KEY_REUSED","detail":"This Idempotency-Key was used for another request. Use a new key.","status":422,"title":"Unprocessable Entity","type":"https://github.com/holdfast-go/holdfast/blob/main/examples/guides/problems.md#idempotency_key_reused"}
}

// Work outside HTTP.
func ExampleDo() {
	store := idempotencytest.NewStore()
	key, err := idempotency.ParseKey("a0eebc999c0b4ef8bb6d6bb9bd380a11")
	if err != nil {
		fmt.Println(err)
		return
	}
	for range 2 {
		receipt, replayed, err := idempotency.Do(context.Background(), store, key, []string{"invoice", "42"},
			func(context.Context) (string, error) {
				fmt.Println("sending invoice 42")
				return "receipt 7", nil
			})
		fmt.Println(receipt, replayed, err)
	}
	// Output:
	// sending invoice 42
	// receipt 7 false <nil>
	// receipt 7 true <nil>
}
