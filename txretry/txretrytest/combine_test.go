package txretrytest_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/metrictest"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// Of a COMMIT without an answer each of the calls that shared it hears the same.
func TestCombinedCommitLost(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name       string
		point      txretrytest.Point
		xactStatus bool
		unknown    bool
		runs       string
		n          int
	}{
		{"applied", txretrytest.ReplyLostApplied, false, true, "ABC", 3},
		{"not applied", txretrytest.ReplyLostNotApplied, false, true, "ABC", 0},
		{"found applied", txretrytest.ReplyLostApplied, true, false, "ABC", 3},
		{"found not applied", txretrytest.ReplyLostNotApplied, true, false, "ABCABC", 3},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var c counter
				var committed sync.Map
				m := txretrytest.New(txretrytest.Config{
					Script: []txretrytest.Fault{{}, {Point: tt.point}},
					Retry:  txretry.Config{XactStatus: tt.xactStatus},
				})
				runs := ""
				errs := standInLine(t, m, txretry.Options{SerialKey: "k", Combine: 9}, 3, func(ctx context.Context, tx pgx.Tx, name string) error {
					runs += name
					txretry.AfterCommit(tx, func() { committed.Store(name, true) })
					return c.Add(ctx, tx, 1)
				})
				if runs != tt.runs || c.value() != tt.n {
					t.Errorf("runs %s, counter %d; want %s, %d", runs, c.value(), tt.runs, tt.n)
				}
				for i, err := range errs {
					name := string(rune('A' + i))
					unknown, is := errors.AsType[*txretry.CommitUnknownError](err)
					if is != tt.unknown || (err != nil) != tt.unknown || is && unknown.Name != name {
						t.Errorf("call %s: error %v", name, err)
					}
					if _, hook := committed.Load(name); hook == tt.unknown {
						t.Errorf("call %s: AfterCommit run: %v", name, hook)
					}
				}
			})
		})
	}
}

// An attempt that meets a conflict at COMMIT is counted for each of the calls that shared it.
func TestCombinedFailuresAreCounted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var metrics metrictest.Recorder
		m := txretrytest.New(txretrytest.Config{
			Script: []txretrytest.Fault{{}, {Point: txretrytest.AtCommit, SQLSTATE: "40001"}},
			Retry:  txretry.Config{MeterProvider: &metrics},
		})
		errs := standInLine(t, m, txretry.Options{SerialKey: "k", Combine: 9}, 3, func(context.Context, pgx.Tx, string) error { return nil })
		if err := errors.Join(errs...); err != nil {
			t.Error(err)
		}
		for _, name := range []string{"A", "B", "C"} {
			if got := metrics.Values("holdfast.txretry.failures{operation=" + name + ",phase=commit,sqlstate=40001}"); len(got) != 1 {
				t.Errorf("call %s: %v failures are counted, want 1", name, got)
			}
			if got := metrics.Values("holdfast.txretry.attempts{operation=" + name + ",outcome=committed}"); !slices.Equal(got, []float64{2}) {
				t.Errorf("call %s: attempts %v, want 2", name, got)
			}
		}
	})
}

// standInLine makes n calls, named "A", "B" and so on, that find their key held and get it in this order.
// It returns their errors.
func standInLine(t *testing.T, m *txretrytest.Manager, opts txretry.Options, n int, fn func(ctx context.Context, tx pgx.Tx, name string) error) []error {
	t.Helper()
	errs := make([]error, n)
	release := make(chan struct{})
	var all sync.WaitGroup
	all.Go(func() {
		err := m.DoWith(t.Context(), txretry.Options{SerialKey: opts.SerialKey}, func(context.Context, pgx.Tx) error {
			<-release
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	})
	synctest.Wait()
	for i := range n {
		opts := opts
		opts.Name = string(rune('A' + i))
		all.Go(func() {
			errs[i] = m.DoWith(t.Context(), opts, func(ctx context.Context, tx pgx.Tx) error { return fn(ctx, tx, opts.Name) })
		})
		synctest.Wait()
	}
	close(release)
	all.Wait()
	return errs
}

// A call that has its turn repeats an attempt sooner than others do, since everyone behind it waits, and
// keeps the turn.
func TestRetryInTurn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		conflict := txretrytest.Fault{Point: txretrytest.AtCommit, SQLSTATE: "40001"}
		m := txretrytest.New(txretrytest.Config{
			Script: []txretrytest.Fault{{}, conflict, conflict, {}, conflict},
			Retry:  txretry.Config{Rand: func() float64 { return 0.5 }},
		})
		var runs string
		var at []time.Duration
		start := time.Now()
		errs := standInLine(t, m, txretry.Options{SerialKey: "k"}, 3, func(_ context.Context, _ pgx.Tx, name string) error {
			runs += name
			at = append(at, time.Since(start))
			return nil
		})
		const ms = time.Millisecond
		if err := errors.Join(errs...); err != nil || runs != "AAABBC" || !slices.Equal(at, []time.Duration{0, 4 * ms, 20 * ms, 20 * ms, 24 * ms, 24 * ms}) {
			t.Errorf("runs %s at %v, error %v", runs, at, err)
		}
	})
}
