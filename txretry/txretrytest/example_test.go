package txretrytest_test

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// The closure appends to a variable that it does not reset. A single run hides the mistake; a conflict at the end of
// the first run shows it.
func ExampleFault() {
	seats := func(script ...txretrytest.Fault) (held []string) {
		manager := txretrytest.New(txretrytest.Config{Script: script, Retry: txretry.Config{BaseDelay: time.Millisecond}})
		_ = manager.Do(context.Background(), func(context.Context, pgx.Tx) error {
			held = append(held, "B1", "B2")
			return nil
		})
		return held
	}
	fmt.Println(seats())
	fmt.Println(seats(txretrytest.Fault{Point: txretrytest.AtEnd, SQLSTATE: "40001"}))
	// Output:
	// [B1 B2]
	// [B1 B2 B1 B2]
}

// The first COMMIT fails with a conflict, and the reply of the second is lost. The effect happens once, and the
// caller gets an error for the unknown outcome.
func ExampleNew() {
	manager := txretrytest.New(txretrytest.Config{
		Script: []txretrytest.Fault{
			{Point: txretrytest.AtCommit, SQLSTATE: "40001"},
			{Point: txretrytest.ReplyLostApplied},
		},
		Retry: txretry.Config{BaseDelay: time.Millisecond},
	})
	sold := 0
	err := manager.Do(context.Background(), func(_ context.Context, tx pgx.Tx) error {
		return txretrytest.Effect(tx, func() { sold++ }, func() { sold-- })
	})
	fmt.Println(err)
	fmt.Printf("%d sold, %+v\n", sold, manager.Stats())
	// Output:
	// txretry: outcome of COMMIT unknown: txretrytest: connection lost during COMMIT
	// 1 sold, {Attempts:2 Commits:1 Rollbacks:1}
}
