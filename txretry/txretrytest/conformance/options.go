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

func testTooLate(f *fixture) {
	ctx, cancel := context.WithTimeout(f.Context(), time.Minute)
	defer cancel()
	err := f.New(quick()).DoWith(ctx, txretry.Options{DeadlineMargin: time.Hour}, func(context.Context, pgx.Tx) error {
		f.Error("fn was run")
		return nil
	})
	f.is(err, context.DeadlineExceeded)
	f.ok(f.New(quick()).DoWith(ctx, txretry.Options{DeadlineMargin: time.Millisecond}, func(ctx context.Context, tx pgx.Tx) error {
		return f.Add(ctx, tx, 1)
	}))
	f.want(1)
}

// The delay would end in time, the attempt after it would not.
func testTooLateAgain(f *fixture) {
	ctx, cancel := context.WithTimeout(f.Context(), time.Minute)
	defer cancel()
	cfg := txretry.Config{BaseDelay: 10 * time.Second, MaxDelay: 10 * time.Second, DeadlineMargin: 55 * time.Second}
	start := time.Now()
	err := f.New(cfg).Do(ctx, func(ctx context.Context, tx pgx.Tx) error { return f.Fail(ctx, tx, "40001") })
	if waited := time.Since(start); waited > 5*time.Second {
		f.Errorf("waited %v before an attempt that cannot end in time", waited)
	}
	var timeout *txretry.LockTimeoutError
	if !errors.As(err, &timeout) {
		f.Fatalf("error %v, want *LockTimeoutError", err)
	}
	f.equal("attempts", len(timeout.Attempts), 1)
	f.is(err, context.DeadlineExceeded)
	f.sqlstate(err, "40001")
}

func testBudget(f *fixture) {
	cfg := quick()
	cfg.RetryBudget = txretry.RetryBudget{Ratio: 0.5, Burst: 3}
	m := f.New(cfg)
	calls := 0
	fail := func(ctx context.Context, tx pgx.Tx) error {
		calls++
		return f.Fail(ctx, tx, "40001")
	}
	for _, want := range []int{4, 1, 2} { // 3 tokens, then half of one, then a whole one
		calls = 0
		err := m.Do(f.Context(), fail)
		f.equal("attempts", calls, want)
		f.is(err, txretry.ErrBudgetSpent)
		f.sqlstate(err, "40001")
		var timeout *txretry.LockTimeoutError
		if !errors.As(err, &timeout) || len(timeout.Attempts) != want {
			f.Errorf("error %v, want *LockTimeoutError after %d attempts", err, want)
		}
	}
}

func testSerialTurn(f *fixture) {
	cfg := quick()
	var m txretry.Transactor
	opts := txretry.Options{SerialKey: "k", Name: "outer"}
	cfg.Hooks.OnDone = func(ctx context.Context, d txretry.Done) {
		if d.Name == "outer" {
			ctx, cancel := context.WithTimeout(ctx, time.Minute)
			defer cancel()
			f.ok(m.DoWith(ctx, txretry.Options{SerialKey: "k"}, func(ctx context.Context, tx pgx.Tx) error { return f.Add(ctx, tx, 10) }))
		}
	}
	m = f.New(cfg)
	f.ok(m.DoWith(f.Context(), opts, func(ctx context.Context, tx pgx.Tx) error { return f.Add(ctx, tx, 1) }))
	f.want(11)
}
