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
func ExampleNewRehearsal() {
	manager := txretrytest.NewManager(txretrytest.Config{Retry: txretry.Config{BaseDelay: time.Millisecond}})
	rehearsal, err := txretrytest.NewRehearsal(manager, 2)
	if err != nil {
		fmt.Println(err)
		return
	}
	seats := func(t txretry.Transactor) (held []string) {
		_ = t.Do(context.Background(), func(context.Context, pgx.Tx) error {
			held = append(held, "B1", "B2")
			return nil
		})
		return held
	}
	fmt.Println(seats(manager))
	fmt.Println(seats(rehearsal))
	// Output:
	// [B1 B2]
	// [B1 B2 B1 B2]
}
