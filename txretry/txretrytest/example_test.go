package txretrytest_test

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// The closure collects into a variable that it does not reset. One run hides
// the mistake, a rehearsal shows it.
func ExampleRehearse() {
	manager := txretrytest.New(txretrytest.Config{Retry: txretry.Config{BaseDelay: time.Millisecond}})
	seats := func(t txretry.Transactor) (held []string) {
		_ = t.Do(context.Background(), func(context.Context, pgx.Tx) error {
			held = append(held, "B1", "B2")
			return nil
		})
		return held
	}
	fmt.Println(seats(manager))
	fmt.Println(seats(txretrytest.Rehearse(manager, 2)))
	// Output:
	// [B1 B2]
	// [B1 B2 B1 B2]
}
