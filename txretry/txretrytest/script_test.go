package txretrytest_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// Struck is called when a fault happens, and not when the attempt ends before the fault.
func TestStruck(t *testing.T) {
	t.Parallel()
	script := []txretrytest.Fault{
		{Point: txretrytest.AtStatement, Statement: 1, SQLSTATE: "40001"}, // there is no statement
		{Point: txretrytest.AtBegin, SQLSTATE: "40001"},
		{Point: txretrytest.AtEnd, SQLSTATE: "40001"},
		{Point: txretrytest.AtCommit, SQLSTATE: "40001"},
		{},
		{Point: txretrytest.ReplyLostApplied},
		{Point: txretrytest.ReplyLostNotApplied},
	}
	var struck []int
	m := txretrytest.New(txretrytest.Config{Script: script, Retry: txretry.Config{Rand: func() float64 { return 0 }}, Struck: func(attempt int, f txretrytest.Fault) {
		if f != script[attempt] {
			t.Errorf("attempt %d met %+v, want %+v", attempt, f, script[attempt])
		}
		struck = append(struck, attempt)
	}})
	for m.Stats().Attempts < len(script) {
		_ = m.Do(t.Context(), func(context.Context, pgx.Tx) error { return nil }) // the last two are unknown
	}
	if want := []int{1, 2, 3, 5, 6}; !slices.Equal(struck, want) {
		t.Errorf("faults of the attempts %v have happened, want those of %v", struck, want)
	}
}

func scripted(faults ...txretrytest.Fault) *txretrytest.Manager {
	return txretrytest.New(txretrytest.Config{Script: faults})
}

// Not every answer to COMMIT says that nothing was applied.
func TestScriptedCommitIsUnknown(t *testing.T) {
	t.Parallel()
	for _, sqlstate := range []string{"08006", "40003", "57P01"} {
		n := 0
		err := scripted(txretrytest.Fault{Point: txretrytest.AtCommit, SQLSTATE: sqlstate}).Do(t.Context(), func(_ context.Context, tx pgx.Tx) error {
			return txretrytest.Effect(tx, func() { n++ }, func() { n-- })
		})
		var unknown *txretry.CommitUnknownError
		if !errors.As(err, &unknown) || n != 0 {
			t.Errorf("%s: error %v, %d applied; want *CommitUnknownError and none", sqlstate, err, n)
		}
	}
}

// A server that shuts down closes the connection: no savepoint heals that.
func TestScriptedShutdown(t *testing.T) {
	t.Parallel()
	n := 0
	add := func(tx pgx.Tx) error { return txretrytest.Effect(tx, func() { n++ }, func() { n-- }) }
	m := scripted(txretrytest.Fault{Point: txretrytest.AtStatement, Statement: 2, SQLSTATE: "57P01"})
	err := m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		if err := add(tx); err != nil {
			return err
		}
		if pgx.BeginFunc(ctx, tx, add) == nil {
			t.Error("a statement went on")
		}
		if add(tx) == nil || tx.QueryRow(ctx, "select 1").Scan() == nil {
			t.Error("a statement was run on a closed connection")
		}
		return nil
	})
	var unavailable *txretry.UnavailableError
	if !errors.As(err, &unavailable) || !errors.Is(err, pgx.ErrTxCommitRollback) || n != 0 {
		t.Errorf("error %v, %d applied; want *UnavailableError of a rollback and none", err, n)
	}
	if got, want := m.Stats(), (txretrytest.Stats{Attempts: 1, Rollbacks: 1}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// The end of a nested call is not the end of fn.
func TestScriptedEndIsNotNested(t *testing.T) {
	t.Parallel()
	m := scripted(txretrytest.Fault{Point: txretrytest.AtEnd, SQLSTATE: "40001"})
	outer, inner := 0, 0
	err := m.Do(t.Context(), func(ctx context.Context, _ pgx.Tx) error {
		outer++
		err := m.DoWith(ctx, txretry.Options{Savepoint: true}, func(context.Context, pgx.Tx) error {
			inner++
			return nil
		})
		if err != nil {
			t.Errorf("the nested call: %v", err)
		}
		return err
	})
	if err != nil || outer != 2 || inner != 2 {
		t.Errorf("error %v after %d and %d calls, want two of each", err, outer, inner)
	}
}

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
