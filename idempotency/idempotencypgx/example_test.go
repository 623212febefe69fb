package idempotencypgx_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// The answer survives even if the gate loses everything after the commit. In
// production the three are txretry.New, idempotencypgx.NewRecords and
// idempotencyredis.NewStore.
func ExampleRunner_Run() {
	manager := txretrytest.New(txretrytest.Config{})
	records := idempotencytest.NewRecords()

	orders := 0
	serve := func(gate idempotency.Store) http.Handler {
		runner, err := idempotencypgx.NewRunner(manager, records, gate, idempotencypgx.RunnerConfig{})
		if err != nil {
			panic(err)
		}
		protect, err := idempotency.NewMiddleware(gate, idempotency.MiddlewareConfig{
			Scope: func(r *http.Request) (string, error) { return r.Header.Get("X-User-Id"), nil },
		})
		if err != nil {
			panic(err)
		}
		return protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, err := runner.Run(r.Context(), func(_ context.Context, tx pgx.Tx) (idempotency.Response, error) {
				err := txretrytest.Effect(tx, func() { orders++ }, func() { orders-- }) // INSERT INTO orders …
				if err != nil {
					return idempotency.Response{}, err
				}
				return idempotency.JSON(http.StatusCreated, fmt.Sprintf("order %d", orders))
			})
			if err != nil {
				http.Error(w, "try again", http.StatusServiceUnavailable)
			}
			// Else the middleware sends the stored response.
		}))
	}

	post := func(handler http.Handler) {
		r := httptest.NewRequest(http.MethodPost, "/orders", nil)
		r.Header.Set("X-User-Id", "alice")
		r.Header.Set("Idempotency-Key", "a0eebc999c0b4ef8bb6d6bb9bd380a11")
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		fmt.Printf("%d %s replayed=%q, %d order in all\n", w.Code, w.Body, w.Header().Get("Idempotency-Replayed"), orders)
	}
	post(serve(idempotencytest.NewStore()))
	post(serve(idempotencytest.NewStore())) // the gate forgot everything
	// Output:
	// 201 "order 1" replayed="", 1 order in all
	// 201 "order 1" replayed="true", 1 order in all
}
