package conformance

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/txretry"
)

func testBusinessError(f *fixture) {
	calls := 0
	err := f.do(func(ctx context.Context, tx pgx.Tx) error {
		calls++
		f.add(ctx, tx, 1)
		return errBusiness
	})
	f.is(err, errBusiness)
	f.equal("calls", calls, 1)
	f.want(0)
}

func testPermanent(f *fixture) {
	for _, sqlstate := range []string{"23505", "23514", "57014", "25P02"} {
		calls := 0
		err := f.do(func(ctx context.Context, tx pgx.Tx) error {
			calls++
			f.add(ctx, tx, 1)
			return f.Fail(ctx, tx, sqlstate)
		})
		f.sqlstate(err, sqlstate)
		f.equal(sqlstate+": calls", calls, 1)
	}
	f.want(0)
}

// outOfOrder are the SQLSTATEs of an unavailable server.
var outOfOrder = []string{"08006", "25006", "53100", "53200", "53300", "57P01", "57P03", "58030"}

func testOutOfOrder(f *fixture) {
	for _, sqlstate := range outOfOrder {
		for name, answer := range map[string]func(err error) error{
			"returned":  func(err error) error { return fmt.Errorf("wrapped: %w", err) },
			"masked":    func(error) error { return errBusiness },
			"swallowed": func(error) error { return nil },
		} {
			calls := 0
			err := f.do(func(ctx context.Context, tx pgx.Tx) error {
				calls++
				f.add(ctx, tx, 1)
				return answer(f.Fail(ctx, tx, sqlstate))
			})
			var unavailable *txretry.UnavailableError
			if !errors.As(err, &unavailable) {
				f.Fatalf("%s, %s: error %v, want *UnavailableError", sqlstate, name, err)
			}
			f.sqlstate(err, sqlstate)
			f.equal(name+": calls", calls, 1)
			f.equal("code", unavailable.Code(), "DATABASE_UNAVAILABLE")
			f.equal("status", unavailable.HTTPStatus(), 503)
			f.equal("retry after", unavailable.RetryAfter(), time.Second)
		}
	}
	f.want(0)
}

func testRetry(sqlstate string) func(f *fixture) {
	return func(f *fixture) {
		calls := 0
		f.ok(f.do(func(ctx context.Context, tx pgx.Tx) error {
			calls++
			f.add(ctx, tx, 1)
			if calls < 3 {
				return errors.Join(errBusiness, fmt.Errorf("wrapped: %w", f.Fail(ctx, tx, sqlstate)))
			}
			return nil
		}))
		f.equal("calls", calls, 3)
		f.want(1)
	}
}

func testExhaustion(f *fixture) {
	calls := 0
	err := f.do(func(ctx context.Context, tx pgx.Tx) error {
		calls++
		f.add(ctx, tx, 1)
		return errors.Join(errBusiness, f.Fail(ctx, tx, "40001"))
	})
	f.equal("calls", calls, 6)
	f.want(0)

	var timeout *txretry.LockTimeoutError
	if !errors.As(err, &timeout) {
		f.Fatalf("error %v, want *LockTimeoutError", err)
	}
	f.equal("attempts", len(timeout.Attempts), 6)
	f.equal("code", timeout.Code(), "LOCK_TIMEOUT")
	f.equal("status", timeout.HTTPStatus(), 503)
	f.equal("retry after", timeout.RetryAfter(), time.Second)
	for _, a := range timeout.Attempts {
		f.equal("SQLSTATE", a.SQLSTATE, "40001")
		f.equal("phase", a.Phase, "fn")
		f.sqlstate(a.Err, "40001")
	}
	f.sqlstate(err, "40001")
	f.is(err, errBusiness)
	if errors.Is(err, context.DeadlineExceeded) {
		f.Error("exhaustion is reported as a passed deadline")
	}
}

// The server's answer to COMMIT may allow a retry, be final, or leave the outcome of the transaction unknown.
func testRefusedCommit(f *fixture) {
	for sqlstate, test := range map[string]struct {
		calls int
		as    any // type of the error; nil: the server's error
	}{
		"40001": {6, new(*txretry.LockTimeoutError)},
		"23514": {1, nil},
		"53100": {1, new(*txretry.UnavailableError)},
		"25006": {1, new(*txretry.UnavailableError)},
		"40003": {1, new(*txretry.CommitUnknownError)},
		"08006": {1, new(*txretry.CommitUnknownError)},
	} {
		calls := 0
		err := f.New(quick()).Do(f.Context(), func(ctx context.Context, tx pgx.Tx) error {
			calls++
			txretry.AfterCommit(tx, func() { f.Errorf("%s: AfterCommit ran", sqlstate) })
			f.add(ctx, tx, 1)
			return f.FailAtCommit(ctx, tx, sqlstate)
		})
		f.sqlstate(err, sqlstate)
		if test.as != nil && !errors.As(err, test.as) {
			f.Errorf("%s: error %v, want a %T", sqlstate, err, test.as)
		}
		f.equal(sqlstate+": calls", calls, test.calls)
	}
	f.want(0)
}

// A transient error is detected even if fn masks it.
func testMasked(f *fixture) {
	for name, mask := range map[string]func(ctx context.Context, tx pgx.Tx, err error) error{
		"masked": func(_ context.Context, _ pgx.Tx, err error) error {
			return fmt.Errorf("lost its cause: %v", scripted(err))
		},
		"masked by a later error": func(ctx context.Context, tx pgx.Tx, _ error) error {
			err := f.Add(ctx, tx, 1)
			f.sqlstate(err, "25P02")
			return err
		},
		"swallowed": func(context.Context, pgx.Tx, error) error { return nil },
	} {
		calls := 0
		f.ok(f.do(func(ctx context.Context, tx pgx.Tx) error {
			if calls++; calls == 1 {
				return mask(ctx, tx, f.Fail(ctx, tx, "40001"))
			}
			return f.Add(ctx, tx, 1)
		}))
		f.equal(name+": calls", calls, 2)
	}
	f.want(3)
}

// scripted prevents go vet from suggesting %w.
func scripted(err error) string { return err.Error() }

func testSwallowedPermanent(f *fixture) {
	calls := 0
	err := f.do(func(ctx context.Context, tx pgx.Tx) error {
		calls++
		f.add(ctx, tx, 1)
		_ = f.Fail(ctx, tx, "23505")
		return nil
	})
	f.is(err, pgx.ErrTxCommitRollback)
	f.sqlstate(err, "23505")
	f.equal("calls", calls, 1)
	f.want(0)
}

// A panic and runtime.Goexit roll back, and the Transactor still works.
func testNoReturn(leave func(), want any) func(f *fixture) {
	return func(f *fixture) {
		m := f.New(quick())
		done := make(chan struct{})
		go func() {
			defer close(done)
			defer func() { f.equal("recovered", recover(), want) }()
			_ = m.Do(f.Context(), func(ctx context.Context, tx pgx.Tx) error {
				f.add(ctx, tx, 1)
				leave()
				return nil
			})
		}()
		<-done
		f.want(0)
		f.ok(m.Do(f.Context(), func(ctx context.Context, tx pgx.Tx) error { return f.Add(ctx, tx, 1) }))
		f.want(1)
	}
}

func testCancelledBefore(f *fixture) {
	ctx, cancel := context.WithCancel(f.Context())
	cancel()
	err := f.New(quick()).Do(ctx, func(context.Context, pgx.Tx) error {
		f.Error("fn was run")
		return nil
	})
	f.is(err, context.Canceled)
}

func testCancelledInside(f *fixture) {
	reason := errors.New("client went away")
	ctx, cancel := context.WithCancelCause(f.Context())
	hooks := 0
	err := f.New(quick()).Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		f.add(ctx, tx, 1)
		txretry.AfterCommit(tx, func() { hooks++ })
		cancel(reason)
		return nil
	})
	f.is(err, context.Canceled)
	f.is(err, reason)
	f.equal("hooks", hooks, 0)
	f.want(0)
}

func testCancelledWaiting(f *fixture) {
	ctx, cancel := context.WithCancel(f.Context())
	cfg := txretry.Config{BaseDelay: time.Hour, MaxDelay: time.Hour}
	cfg.Rand = func() float64 { // called right before the delay
		cancel()
		return 0
	}
	err := f.New(cfg).Do(ctx, func(ctx context.Context, tx pgx.Tx) error { return f.Fail(ctx, tx, "40001") })
	f.is(err, context.Canceled)
	f.sqlstate(err, "40001")
	var timeout *txretry.LockTimeoutError
	if errors.As(err, &timeout) {
		f.Error("a cancelled call is reported as LOCK_TIMEOUT")
	}
}

// The error has the cause of the context's end, wherever the end was detected.
func testCause(f *fixture) {
	reason := errors.New("client went away")
	m := f.New(txretry.Config{BaseDelay: time.Hour, MaxDelay: time.Hour})
	conflict := func(ctx context.Context, tx pgx.Tx) error {
		err := f.Fail(f.Context(), tx, "40001")
		<-ctx.Done()
		return err
	}
	var timeout *txretry.LockTimeoutError

	ctx, err, begun := f.Context(), error(nil), false
	for within := 500 * time.Millisecond; !begun && within < time.Minute; within *= 2 { // a busy server may need longer to begin
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(f.Context(), within, reason)
		defer cancel()
		err = m.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
			begun = true
			return conflict(ctx, tx)
		})
	}
	f.equal("fn was called", begun, true)
	f.is(err, context.DeadlineExceeded)
	f.is(err, reason)
	f.sqlstate(err, "40001")
	f.equal("a passed deadline is *LockTimeoutError", errors.As(err, &timeout), true)

	err = m.Do(ctx, conflict) // ends while waiting for a connection
	f.is(err, context.DeadlineExceeded)
	f.is(err, reason)

	base, end := context.WithCancelCause(f.Context())
	ctx, cancel := context.WithTimeout(base, time.Minute)
	defer cancel()
	err = m.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		end(reason)
		return conflict(ctx, tx)
	})
	f.is(err, context.Canceled)
	f.is(err, reason)
	f.sqlstate(err, "40001")
	f.equal("a cancelled call near its deadline is *LockTimeoutError", errors.As(err, &timeout), false)
}

func testDeadline(f *fixture) {
	ctx, cancel := context.WithTimeout(f.Context(), time.Minute)
	defer cancel()
	start := time.Now()
	cfg := txretry.Config{BaseDelay: time.Hour, MaxDelay: time.Hour}
	err := f.New(cfg).Do(ctx, func(ctx context.Context, tx pgx.Tx) error { return f.Fail(ctx, tx, "55P03") })
	if waited := time.Since(start); waited > 30*time.Second {
		f.Errorf("waited %v for a delay that cannot end in time", waited)
	}
	var timeout *txretry.LockTimeoutError
	if !errors.As(err, &timeout) {
		f.Fatalf("error %v, want *LockTimeoutError", err)
	}
	f.equal("attempts", len(timeout.Attempts), 1)
	f.is(err, context.DeadlineExceeded)
	f.sqlstate(err, "55P03")
}

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
		f.Error("55P03 with NoWait is reported as LOCK_TIMEOUT")
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

// The next call with the same SerialKey does not wait for the AfterCommit functions of this one.
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

func boom() { panic("boom") }
