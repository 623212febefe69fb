package conformance

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
)

// refused is an error that has a status for the client.
type refused struct{ status int }

func (r refused) Error() string   { return fmt.Sprintf("refused with %d", r.status) }
func (refused) Code() string      { return "INVALID_REQUEST" }
func (r refused) HTTPStatus() int { return r.status }

// testStatusDecides answers in both ways that a handler has: by a Response and by an error.
func testStatusDecides(t *testing.T, db Database) {
	for name, gate := range map[string]driver.Store{"records alone": nil, "gate": db.gate(t)} {
		store := db.store(t, gate)
		for status, kept := range map[int]bool{
			400: true, 404: true, 409: true, 422: true, 401: false, 408: false, 425: false, 429: false, 499: false, 500: false, 503: false,
		} {
			for _, fails := range []bool{false, true} {
				runs := 0
				handler := store.Handler(func(context.Context, pgx.Tx, *http.Request) (idempotency.Response, error) {
					if runs++; fails {
						return idempotency.Response{}, refused{status}
					}
					return idempotency.Response{Status: status}, nil
				})
				key, service := idempotency.NewKey(), newService(t, store, idempotency.MiddlewareConfig{}, handler.ServeHTTP)
				first, again := service.post(key), service.post(key)
				if first.status != status || again.status != status || again.body != first.body || again.replayed() != kept || runs == 1 != kept {
					t.Errorf("%s, %d by an error %v: %d runs, then %+v; want kept %v", name, status, fails, runs, again, kept)
				}
			}
		}
	}
}

// testErrorIsNoReplay asks for a key that is another request's, with the record in each place where it may be.
func testErrorIsNoReplay(t *testing.T, db Database) {
	gate := db.gate(t)
	for name, stores := range map[string][2]driver.Store{
		"records alone": {nil, nil}, "gate": {gate, gate}, "a gate that forgot": {gate, db.gate(t)}, "no gate any more": {gate, gone{}},
	} {
		key := idempotency.NewKey()
		fn := func(context.Context, pgx.Tx) (idempotency.Response, error) {
			return idempotency.Response{Status: 201}, nil
		}
		_, _, err := db.store(t, stores[0]).DoKey(t.Context(), key, []string{"one"}, fn)
		must(t, name, err)
		_, replayed, err := db.store(t, stores[1]).DoKey(t.Context(), key, []string{"other"}, fn)
		if !errors.Is(err, idempotency.ErrKeyReused) || replayed {
			t.Errorf("%s: replayed %v, error %v", name, replayed, err)
		}
	}
	// A value of another type than the one that is stored.
	store, key := db.store(t, nil), idempotency.NewKey()
	for n := range 2 {
		value, replayed, err := idempotency.Do(t.Context(), store, key, nil, func(context.Context) (any, error) { return "text", nil })
		if err != nil || value != "text" || replayed != (n > 0) {
			t.Errorf("call %d: %v, %v, %v", n, value, replayed, err)
		}
	}
	if _, replayed, err := idempotency.Do(t.Context(), store, key, nil, func(context.Context) (int, error) { return 1, nil }); err == nil || replayed {
		t.Errorf("a value that cannot be decoded: replayed %v, error %v", replayed, err)
	}
}
