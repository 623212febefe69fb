package expiry_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirytest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// With a database use expirypgx.New instead of expirytest.New, and write to the outbox in Emit.
func Example() {
	ctx := context.Background()
	manager := txretrytest.New(txretrytest.Config{})
	holds, err := expirytest.New(manager, expirytest.Config{
		Emit: func(_ context.Context, _ pgx.Tx, rows []expiry.Row) error {
			for _, row := range rows {
				fmt.Println("expired:", row.ID)
			}
			return nil
		},
	})
	if err != nil {
		panic(err)
	}
	err = manager.Do(ctx, func(_ context.Context, tx pgx.Tx) error {
		return errors.Join(
			holds.Put(tx, "seat A1", time.Now().Add(-time.Minute), "held"),
			holds.Put(tx, "seat A2", time.Now().Add(time.Hour), "held"),
		)
	})
	if err != nil {
		panic(err)
	}

	sweeper, err := expiry.NewSweeper(holds, expiry.SweeperConfig{})
	if err != nil {
		panic(err)
	}
	report, err := sweeper.Sweep(ctx) // one sweep; Run repeats them
	fmt.Println(report.Expired, "of 2,", err)
	// Output:
	// expired: seat A1
	// 1 of 2, <nil>
}

func ExampleSweeperConfig() {
	holds, err := expirytest.New(txretrytest.New(txretrytest.Config{}), expirytest.Config{})
	if err != nil {
		panic(err)
	}
	for _, schedule := range []string{"*/30 * * * *", "CRON_TZ=Europe/Berlin 30 2 * * *", "@every 90s", "0 0 30 2 *"} {
		_, err := expiry.NewSweeper(holds, expiry.SweeperConfig{Schedule: schedule})
		fmt.Println(err)
	}
	// Output:
	// <nil>
	// <nil>
	// <nil>
	// expiry: SweeperConfig.Schedule: "0 0 30 2 *" never comes
}

// A RowError names the row at fault, so that no search is needed.
func ExampleRowError() {
	err := error(&expiry.RowError{ID: "seat A1", Err: errors.New("no such seat")})
	fmt.Println(err)
	// Output: expiry: row seat A1: no such seat
}

func ExampleEventID() {
	deadline := time.Date(2026, 11, 20, 10, 0, 0, 0, time.UTC)
	first := expiry.EventID("hold.expired", "seat A1", deadline)
	again := expiry.EventID("hold.expired", "seat A1", deadline)
	fmt.Println(first == again, first.Version())
	// Output: true VERSION_7
}
