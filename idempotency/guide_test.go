package idempotency_test

import (
	"context"
	"encoding/json"
	"net/http"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/txretry"
)

// The code of README.md, so that the compiler checks it too.

var _ = []any{guideHandler, guideChild}

type order struct {
	ID    string
	Cents int
}

func guideHandler(ctx context.Context, manager *txretry.Manager, mux *http.ServeMux) (http.Handler, error) {
	once, err := idempotencypgx.New(manager, idempotencypgx.Config{})
	if err != nil {
		return nil, err
	}
	caller := func(r *http.Request) (string, error) { return r.Header.Get("X-User-Id"), nil } // set by the authentication
	protect, err := idempotency.NewMiddleware(once, caller, idempotency.MiddlewareConfig{})
	if err != nil {
		return nil, err
	}
	if err := once.Migrate(ctx); err != nil { // safe in many processes at once
		return nil, err
	}
	mux.Handle("POST /orders", protect(once.Handler(place)))
	return mux, nil
}

func place(ctx context.Context, tx pgx.Tx, r *http.Request) (idempotency.Response, error) {
	var o order
	if err := json.NewDecoder(r.Body).Decode(&o); err != nil {
		return idempotency.JSON(http.StatusBadRequest, "an order is a JSON object")
	}
	if _, err := tx.Exec(ctx, "INSERT INTO orders (id, cents) VALUES ($1, $2)", o.ID, o.Cents); err != nil {
		return idempotency.Response{}, err
	}
	return idempotency.JSON(http.StatusCreated, o)
}

func guideChild(ctx context.Context, charge func(context.Context, idempotency.Key) error) error {
	key, err := idempotency.ChildKey(ctx, "payment")
	if err != nil {
		return err
	}
	idempotency.MarkEffect(ctx) // from here on, this key never runs again
	return charge(ctx, key)
}
