package conformance

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/txretry"
)

func testNoWait(f *fixture) {
	calls := 0
	err := f.New(quick()).DoWith(f.Context(), txretry.Options{NoWait: true}, func(ctx context.Context, tx pgx.Tx) error {
		calls++
		if calls == 1 {
			return f.Fail(ctx, tx, "40001")
		}
		return f.Fail(ctx, tx, "55P03")
	})
	f.equal("calls", calls, 2)
	f.sqlstate(err, "55P03")
	var timeout *txretry.LockTimeoutError
	if errors.As(err, &timeout) {
		f.Error("an answer is reported as LOCK_TIMEOUT")
	}
}

func testConstraintRetried(f *fixture) {
	for _, sqlstate := range []string{"23505", "23P01"} {
		calls := 0
		f.ok(f.New(quick()).DoWith(f.Context(), txretry.Options{RetryConstraints: true}, func(ctx context.Context, tx pgx.Tx) error {
			calls++
			f.add(ctx, tx, 1)
			if calls == 1 {
				return f.Fail(ctx, tx, sqlstate)
			}
			return nil
		}))
		f.equal("calls", calls, 2)
	}
	f.want(2)
}

func testConstraintPersists(f *fixture) {
	for sqlstate, want := range map[string]int{"23505": 3, "23P01": 3, "23503": 1, "57014": 1} {
		calls := 0
		opts := txretry.Options{RetryConstraints: true, MaxAttempts: 3}
		err := f.New(quick()).DoWith(f.Context(), opts, func(ctx context.Context, tx pgx.Tx) error {
			calls++
			return f.Fail(ctx, tx, sqlstate)
		})
		f.sqlstate(err, sqlstate)
		var timeout *txretry.LockTimeoutError
		if errors.As(err, &timeout) {
			f.Errorf("%s is reported as LOCK_TIMEOUT", sqlstate)
		}
		f.equal(sqlstate+": calls", calls, want)
	}
}

// The next in line does not wait for the AfterCommit functions of a call.
func testSerialTurn(f *fixture) {
	m := f.New(quick())
	opts := txretry.Options{SerialKey: "k"}
	f.ok(m.DoWith(f.Context(), opts, func(ctx context.Context, tx pgx.Tx) error {
		txretry.AfterCommit(tx, func() {
			ctx, cancel := context.WithTimeout(f.Context(), time.Minute)
			defer cancel()
			f.ok(m.DoWith(ctx, opts, func(ctx context.Context, tx pgx.Tx) error { return f.Add(ctx, tx, 10) }))
		})
		return f.Add(ctx, tx, 1)
	}))
	f.want(11)
}
