package expiry_test

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirytest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// With a database, expirypgx.NewStore takes the place of expirytest.NewStore,
// and Emit writes to the outbox.
func Example() {
	ctx := context.Background()
	manager := txretrytest.New(txretrytest.Config{})
	holds := expirytest.NewTable()
	store, err := expirytest.NewStore(manager, expirytest.Config{
		Active: holds.Active,
		Expire: holds.Expire,
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
		if err := holds.Put(tx, "seat A1", time.Now().Add(-time.Minute), expirytest.Held); err != nil {
			return err
		}
		return holds.Put(tx, "seat A2", time.Now().Add(time.Hour), expirytest.Held)
	})
	if err != nil {
		panic(err)
	}

	sweeper, err := expiry.NewSweeper(store, expiry.SweeperConfig{}) // Run would go on
	if err != nil {
		panic(err)
	}
	report, err := sweeper.Sweep(ctx)
	fmt.Println(report.Expired, "of 2,", err)
	// Output:
	// expired: seat A1
	// 1 of 2, <nil>
}

func ExampleParseSchedule() {
	schedule, err := expiry.ParseSchedule("*/30 * * * *")
	if err != nil {
		panic(err)
	}
	fmt.Println(schedule.Next(time.Date(2026, 11, 20, 10, 5, 0, 0, time.UTC)))
	_, err = expiry.ParseSchedule("0 0 30 2 *")
	fmt.Println(err)
	// Output:
	// 2026-11-20 10:30:00 +0000 UTC
	// expiry: bad schedule: "0 0 30 2 *" never comes
}
