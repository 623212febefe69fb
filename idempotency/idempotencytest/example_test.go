package idempotencytest_test

import (
	"context"
	"fmt"
	"log"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/pgtest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// The reply to COMMIT is lost, but the transaction was applied: the record shows that.
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

// A test of a function with a key on Postgres. Its answer has an id that differs in each attempt. The compared rows
// therefore leave the id out, but a repeated request must get the same answer.
func ExampleProve() {
	var t *testing.T // the t of your test

	pool := pgtest.New(t)
	// … Migrate, CREATE TABLE charges (id bigserial, cents int) …
	proof := txretrytest.Proof{
		Pool:  pool,
		Reset: "TRUNCATE charges, holdfast_idempotency",
		Rows:  []string{"SELECT cents FROM charges"},
	}
	type request = func(ctx context.Context, key idempotency.Key) (idempotency.Response, error)
	idempotencytest.Prove(t, proof, func(pool *pgxpool.Pool) (request, error) {
		manager, err := txretry.New(pool, txretry.Config{})
		if err != nil {
			return nil, err
		}
		store, err := idempotencypgx.New(manager, idempotencypgx.Config{})
		return func(ctx context.Context, key idempotency.Key) (idempotency.Response, error) {
			resp, _, err := store.DoKey(ctx, key, nil, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
				var id int64
				if err := tx.QueryRow(ctx, "INSERT INTO charges (cents) VALUES (4200) RETURNING id").Scan(&id); err != nil {
					return idempotency.Response{}, err
				}
				return idempotency.JSON(201, id)
			})
			return resp, err
		}, err
	})
}
