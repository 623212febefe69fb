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

	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

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
