package txretrytest_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

func lost(p txretrytest.Point) []txretrytest.Fault {
	return []txretrytest.Fault{{Point: p}, {Point: p}}
}

func TestResolver(t *testing.T) {
	t.Parallel()
	answers := func(o txretry.Outcome, err error) txretry.Resolver {
		return txretry.Probe(func(context.Context, pgx.Tx) (txretry.Outcome, error) { return o, err })
	}
	tests := []struct {
		name     string
		point    txretrytest.Point
		resolver txretry.Resolver
		outcome  txretry.Outcome
		calls    int
		n        int
	}{
		{"status, applied", txretrytest.ReplyLostApplied, txretry.XactStatus(), txretry.Committed, 1, 1},
		{"status, not applied, then retried", txretrytest.ReplyLostNotApplied, txretry.XactStatus(), txretry.Committed, 3, 1},
		{"probe finds it", txretrytest.ReplyLostApplied, answers(txretry.Committed, nil), txretry.Committed, 1, 1},
		{"probe proves absence", txretrytest.ReplyLostNotApplied, answers(txretry.RolledBack, nil), txretry.Committed, 3, 1},
		{"probe knows nothing", txretrytest.ReplyLostApplied, answers(txretry.Unknown, nil), txretry.Unknown, 1, 1},
		{"probe fails", txretrytest.ReplyLostNotApplied, answers(txretry.RolledBack, errors.New("no")), txretry.Unknown, 1, 0},
		{"nobody asks", txretrytest.ReplyLostApplied, txretry.Resolver{}, txretry.Unknown, 1, 1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var c counter
				var done txretry.Done
				m := txretrytest.New(txretrytest.Config{Script: lost(tt.point), Retry: txretry.Config{
					Resolver: tt.resolver,
					Hooks:    txretry.Hooks{OnDone: func(_ context.Context, d txretry.Done) { done = d }},
				}})
				calls, committed, rolledBack := 0, 0, 0
				err := m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
					calls++
					txretry.AfterCommit(tx, func() { committed++ })
					txretry.AfterRollback(tx, func() { rolledBack++ })
					return c.Add(ctx, tx, 1)
				})
				if done.Outcome != tt.outcome || calls != tt.calls || c.value() != tt.n {
					t.Errorf("outcome %s, %d calls, counter %d; want %s, %d, %d", done.Outcome, calls, c.value(), tt.outcome, tt.calls, tt.n)
				}
				known := tt.outcome == txretry.Committed
				var unknown *txretry.CommitUnknownError
				if errors.As(err, &unknown) == known || (err == nil) != known || (committed == 1) != known || rolledBack != 0 {
					t.Errorf("error %v, %d and %d functions run", err, committed, rolledBack)
				}
				if errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("error %v: the end of ResolveTimeout is taken for that of the caller's context", err)
				}
			})
		})
	}
}

// The last attempt's COMMIT was lost, and found rolled back: that is no lock
// timeout, and no unknown outcome either.
func TestResolvedWithoutAttemptsLeft(t *testing.T) {
	t.Parallel()
	m := txretrytest.New(txretrytest.Config{
		Script: lost(txretrytest.ReplyLostNotApplied),
		Retry:  txretry.Config{MaxAttempts: 1, Resolver: txretry.XactStatus()},
	})
	ran := 0
	err := m.Do(t.Context(), func(_ context.Context, tx pgx.Tx) error {
		txretry.AfterRollback(tx, func() { ran++ })
		return nil
	})
	var unknown *txretry.CommitUnknownError
	var timeout *txretry.LockTimeoutError
	if err == nil || errors.As(err, &unknown) || errors.As(err, &timeout) || ran != 1 {
		t.Errorf("error %v, AfterRollback ran %d times", err, ran)
	}
}

// The probe's own writes never stay, and it waits as long as ResolveTimeout.
func TestProbeIsAside(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var c counter
		asked := 0
		m := txretrytest.New(txretrytest.Config{Script: lost(txretrytest.ReplyLostApplied), Retry: txretry.Config{ResolveTimeout: time.Minute}})
		start := time.Now()
		err := m.DoWith(t.Context(), txretry.Options{Resolver: txretry.Probe(func(ctx context.Context, tx pgx.Tx) (txretry.Outcome, error) {
			asked++
			return txretry.Unknown, c.Add(ctx, tx, 1000)
		})}, func(ctx context.Context, tx pgx.Tx) error { return c.Add(ctx, tx, 1) })
		var unknown *txretry.CommitUnknownError
		if waited := time.Since(start); !errors.As(err, &unknown) || waited != time.Minute || asked < 100 {
			t.Errorf("error %v after %v, asked %d times", err, waited, asked)
		}
		if got := m.Stats(); got != (txretrytest.Stats{Attempts: 1, Commits: 1}) || c.value() != 1 {
			t.Errorf("stats %+v, counter %d: the probe left something", got, c.value())
		}
	})
}
