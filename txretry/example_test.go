package txretry_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

var errSoldOut = errors.New("sold out")

// The fake replaces a database here. Its script makes the first COMMIT fail with a serialization failure. The
// function runs again, and its effect happens once.
func Example() {
	manager := txretrytest.New(txretrytest.Config{
		Script: []txretrytest.Fault{{Point: txretrytest.AtCommit, SQLSTATE: "40001"}},
	})
	free := 1
	buy := func(ctx context.Context, tx pgx.Tx) error {
		if free == 0 {
			return errSoldOut
		}
		txretry.AfterCommit(tx, func() { fmt.Println("committed, free:", free) })
		return txretrytest.Effect(tx, func() { free-- }, func() { free++ })
	}

	fmt.Println("first:", manager.Do(context.Background(), buy))
	fmt.Println("second:", manager.Do(context.Background(), buy))
	fmt.Println("attempts:", manager.Stats().Attempts)
	// Output:
	// committed, free: 0
	// first: <nil>
	// second: sold out
	// attempts: 3
}

// A caller distinguishes the errors of Do by type.
func ExampleLockTimeoutError() {
	manager := txretrytest.New(txretrytest.Config{
		Script: []txretrytest.Fault{{Point: txretrytest.AtEnd, SQLSTATE: "55P03"}},
		Retry:  txretry.Config{MaxAttempts: 1},
	})
	err := manager.Do(context.Background(), func(context.Context, pgx.Tx) error { return nil })

	var timeout *txretry.LockTimeoutError
	if errors.As(err, &timeout) {
		fmt.Println(timeout.HTTPStatus(), timeout.Code(), timeout.RetryAfter(), timeout.Attempts[0].SQLSTATE)
	}
	// Output: 503 LOCK_TIMEOUT 1s 55P03
}

// The reply of the first COMMIT is lost, and nothing was applied. The manager finds this out and runs the function
// again.
func ExampleConfig_xactStatus() {
	manager := txretrytest.New(txretrytest.Config{
		Script: []txretrytest.Fault{{Point: txretrytest.ReplyLostNotApplied}},
		Retry:  txretry.Config{XactStatus: true},
	})
	sold := 0
	err := manager.Do(context.Background(), func(_ context.Context, tx pgx.Tx) error {
		return txretrytest.Effect(tx, func() { sold++ }, func() { sold-- })
	})
	fmt.Println(err, sold, manager.Stats().Attempts)
	// Output: <nil> 1 2
}

// This function can be a separate transaction, or part of a larger one.
func ExampleOptions_savepoint() {
	manager := txretrytest.New(txretrytest.Config{})
	hold := func(ctx context.Context, seat string) error {
		opts := txretry.Options{Name: "seat.hold", Savepoint: true}
		return manager.DoWith(ctx, opts, func(_ context.Context, tx pgx.Tx) error {
			if seat == "B2" {
				return errSoldOut
			}
			txretry.AfterCommit(tx, func() { fmt.Println("held", seat) })
			return nil
		})
	}
	err := manager.Do(context.Background(), func(ctx context.Context, _ pgx.Tx) error {
		for _, seat := range []string{"B1", "B2", "B3"} {
			if err := hold(ctx, seat); err != nil {
				fmt.Println(seat, err) // its savepoint is rolled back, the rest continues
			}
		}
		return nil
	})
	fmt.Println(err)
	// Output:
	// B2 sold out
	// held B1
	// held B3
	// <nil>
}
