//go:build !race

package txretry_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/txretry"
)

func rawOneTrip(ctx context.Context, pool *pgxpool.Pool) error {
	opts := pgx.TxOptions{BeginQuery: "begin isolation level serializable; set local lock_timeout = '8000ms'"}
	return pgx.BeginTxFunc(ctx, pool, opts, func(tx pgx.Tx) error { return add(ctx, tx, 1) })
}

// A call allocates little more than pgx for the same statements. The test is not parallel, because it counts the
// allocations of the whole process.
func TestAllocations(t *testing.T) {
	pool := newCounter(t)
	m := newManager(t, pool, txretry.Config{RetryBudget: 0.5})
	for name, newCtx := range map[string]func() (context.Context, context.CancelFunc){
		"background":  func() (context.Context, context.CancelFunc) { return context.Background(), func() {} },
		"cancellable": func() (context.Context, context.CancelFunc) { return context.WithCancel(context.Background()) },
	} {
		ctx, cancel := newCtx()
		defer cancel()
		raw := testing.AllocsPerRun(100, func() {
			if err := rawOneTrip(ctx, pool); err != nil {
				t.Fatal(err)
			}
		})
		ours := testing.AllocsPerRun(100, func() {
			if err := m.Do(ctx, func(ctx context.Context, tx pgx.Tx) error { return add(ctx, tx, 1) }); err != nil {
				t.Fatal(err)
			}
		})
		t.Logf("%s context: %v allocations raw, %v ours", name, raw, ours)
		if ours-raw > 6 {
			t.Errorf("%s context: %v allocations beyond raw, want at most 6", name, ours-raw)
		}
	}
}
