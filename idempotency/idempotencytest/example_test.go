package idempotencytest_test

import (
	"context"
	"fmt"
	"log"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// The reply to COMMIT is lost, and the transaction was applied: the record says so.
func ExampleNew() {
	manager := txretrytest.New(txretrytest.Config{Script: []txretrytest.Fault{{Point: txretrytest.ReplyLostApplied}}})
	store, err := idempotencytest.New(manager, idempotencypgx.Config{})
	if err != nil {
		log.Fatal(err)
	}
	charges := 0
	for range 2 {
		resp, replayed, err := store.DoKey(context.Background(), "a0eebc999c0b4ef8bb6d6bb9bd380a11", nil,
			func(_ context.Context, tx pgx.Tx) (idempotency.Response, error) {
				if err := txretrytest.Effect(tx, func() { charges++ }, func() { charges-- }); err != nil {
					return idempotency.Response{}, err
				}
				return idempotency.JSON(201, "charged")
			})
		fmt.Printf("%d %s replayed=%v %v, %d charge\n", resp.Status, resp.Body, replayed, err, charges)
	}
	// Output:
	// 201 "charged" replayed=false <nil>, 1 charge
	// 201 "charged" replayed=true <nil>, 1 charge
}

// A gate in memory, for services whose work is no transaction.
func ExampleNewStore() {
	store := idempotencytest.NewStore()
	for range 2 {
		answer, replayed, err := idempotency.Do(context.Background(), store, "a0eebc999c0b4ef8bb6d6bb9bd380a11", []string{"greet"},
			func(context.Context) (string, error) { return "hello", nil })
		fmt.Println(answer, replayed, err)
	}
	// Output:
	// hello false <nil>
	// hello true <nil>
}
