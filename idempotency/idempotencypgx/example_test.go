package idempotencypgx_test

import (
	"context"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// soldOut is an error of the shop that clients see, with a code and a status.
type soldOut struct{}

func (soldOut) Error() string   { return "no seat is left" }
func (soldOut) Code() string    { return "SOLD_OUT" }
func (soldOut) HTTPStatus() int { return http.StatusConflict }

// Handler runs the transaction, stores the record and sends the answer. This example runs in memory; in production
// New makes the store, with a manager of txretry.New.
func ExampleStore_Handler() {
	// The first attempt to commit conflicts with another transaction and is retried.
	manager := txretrytest.New(txretrytest.Config{Script: []txretrytest.Fault{{Point: txretrytest.AtCommit, SQLSTATE: "40001"}}})
	store, err := idempotencytest.New(manager, idempotencypgx.Config{})
	if err != nil {
		log.Fatal(err)
	}
	user := func(r *http.Request) (string, error) { return r.Header.Get("X-User-Id"), nil }
	protect, err := idempotency.NewMiddleware(store, user, idempotency.MiddlewareConfig{})
	if err != nil {
		log.Fatal(err)
	}
	seats := 1
	handler := protect(store.Handler(func(_ context.Context, tx pgx.Tx, r *http.Request) (idempotency.Response, error) {
		if seats == 0 {
			return idempotency.Response{}, soldOut{}
		}
		if err := txretrytest.Effect(tx, func() { seats-- }, func() { seats++ }); err != nil { // UPDATE seats …
			return idempotency.Response{}, err
		}
		return idempotency.JSON(http.StatusCreated, "seat for "+r.Header.Get("X-User-Id"))
	}))

	post := func(user, key string) {
		r := httptest.NewRequest(http.MethodPost, "/seats", strings.NewReader("{}"))
		r.Header.Set("X-User-Id", user)
		r.Header.Set(idempotency.Header, key)
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		fmt.Printf("%d %s\n", w.Code, strings.TrimSpace(w.Body.String()))
	}
	post("alice", "a0eebc999c0b4ef8bb6d6bb9bd380a11")
	post("alice", "a0eebc999c0b4ef8bb6d6bb9bd380a11")
	post("bob", "6ecd8c99403648a8a1fbf1ba1a3b1f4b")
	fmt.Println("seats left:", seats)
	// Output:
	// 201 "seat for alice"
	// 201 "seat for alice"
	// 409 {"code":"SOLD_OUT","status":409,"title":"Conflict","type":"about:blank"}
	// seats left: 0
}

// DoKey is for work outside HTTP: here a job that is delivered twice.
func ExampleStore_DoKey() {
	store, err := idempotencytest.New(txretrytest.New(txretrytest.Config{}), idempotencypgx.Config{})
	if err != nil {
		log.Fatal(err)
	}
	sent := 0
	for range 2 {
		_, replayed, err := store.DoKey(context.Background(), "a0eebc999c0b4ef8bb6d6bb9bd380a11", []string{"invoice", "42"},
			func(_ context.Context, tx pgx.Tx) (idempotency.Response, error) {
				err := txretrytest.Effect(tx, func() { sent++ }, func() { sent-- }) // INSERT INTO invoices …
				return idempotency.Response{Status: http.StatusOK}, err
			})
		fmt.Println(sent, replayed, err)
	}
	// Output:
	// 1 false <nil>
	// 1 true <nil>
}
