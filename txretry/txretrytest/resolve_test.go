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

// asked is a Witness with one answer.
func asked(committed bool, err error) txretry.Options {
	return txretry.Options{Witness: func(context.Context, pgx.Tx) (bool, error) { return committed, err }}
}

func TestResolve(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name       string
		point      txretrytest.Point
		xactStatus bool
		opts       txretry.Options
		known      bool
		calls      int
		n          int
	}{
		{"status, applied", txretrytest.ReplyLostApplied, true, txretry.Options{}, true, 1, 1},
		{"status, not applied, then retried", txretrytest.ReplyLostNotApplied, true, txretry.Options{}, true, 3, 1},
		{"witness finds it", txretrytest.ReplyLostApplied, false, asked(true, nil), true, 1, 1},
		{"witness proves absence", txretrytest.ReplyLostNotApplied, false, asked(false, nil), true, 3, 1},
		{"witness before status", txretrytest.ReplyLostApplied, true, asked(false, errors.New("no")), false, 1, 1},
		{"witness fails", txretrytest.ReplyLostNotApplied, false, asked(false, errors.New("no")), false, 1, 0},
		{"nobody asks", txretrytest.ReplyLostApplied, false, txretry.Options{}, false, 1, 1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var c counter
				m := txretrytest.New(txretrytest.Config{Script: lost(tt.point), Retry: txretry.Config{XactStatus: tt.xactStatus}})
				calls, committed := 0, 0
				err := m.DoWith(t.Context(), tt.opts, func(ctx context.Context, tx pgx.Tx) error {
					calls++
					txretry.AfterCommit(tx, func() { committed++ })
					return c.Add(ctx, tx, 1)
				})
				if calls != tt.calls || c.value() != tt.n {
					t.Errorf("%d calls, counter %d; want %d, %d", calls, c.value(), tt.calls, tt.n)
				}
				var unknown *txretry.CommitUnknownError
				if errors.As(err, &unknown) == tt.known || (err == nil) != tt.known || (committed == 1) != tt.known {
					t.Errorf("error %v, %d functions run", err, committed)
				}
				if !tt.known && (unknown.Code() != "COMMIT_UNKNOWN" || unknown.HTTPStatus() != 500) {
					t.Errorf("maps to %d %s", unknown.HTTPStatus(), unknown.Code())
				}
				if errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("error %v: the end of asking is taken for that of the caller's context", err)
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
		Retry:  txretry.Config{MaxAttempts: 1, XactStatus: true},
	})
	err := m.Do(t.Context(), func(context.Context, pgx.Tx) error { return nil })
	var unknown *txretry.CommitUnknownError
	var timeout *txretry.LockTimeoutError
	if err == nil || errors.As(err, &unknown) || errors.As(err, &timeout) {
		t.Errorf("error %v", err)
	}
}

// What a witness writes never stays, and it is asked for ten seconds.
func TestWitnessIsAside(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var c counter
		asked := 0
		m := txretrytest.New(txretrytest.Config{Script: lost(txretrytest.ReplyLostApplied)})
		start := time.Now()
		err := m.DoWith(t.Context(), txretry.Options{Witness: func(ctx context.Context, tx pgx.Tx) (bool, error) {
			asked++
			return false, errors.Join(c.Add(ctx, tx, 1000), errors.New("cannot say"))
		}}, func(ctx context.Context, tx pgx.Tx) error { return c.Add(ctx, tx, 1) })
		var unknown *txretry.CommitUnknownError
		if waited := time.Since(start); !errors.As(err, &unknown) || waited != 10*time.Second || asked < 20 {
			t.Errorf("error %v after %v, asked %d times", err, waited, asked)
		}
		if got := m.Stats(); got != (txretrytest.Stats{Attempts: 1, Commits: 1}) || c.value() != 1 {
			t.Errorf("stats %+v, counter %d: the witness left something", got, c.value())
		}
	})
}
