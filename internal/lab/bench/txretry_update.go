package main

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/lab/load"
	"github.com/holdfast-go/holdfast/txretry"
)

// benchUpdate runs one UPDATE by key per transaction; nobody contends.
func benchUpdate(ctx context.Context, b *bench) {
	const goroutines = 8
	pool, manager := accountBank(ctx, b)
	t := table{
		title:      fmt.Sprintf("txretry, one UPDATE by key, goroutines: %d", goroutines),
		columns:    []string{"tx/s", "client us/tx", "attempts/tx"},
		prepare:    func(ctx context.Context) error { return resetAccounts(ctx, pool) },
		yardsticks: []string{rawOneTrip, crdbPgx},
	}
	for _, w := range []struct {
		name string
		way  way
	}{
		{rawOneTrip, oneTrip(pool)},
		{crdbPgx, crdbExecuteTx(pool)},
		{ours, managed(manager)},
	} {
		t.contenders = append(t.contenders, contender{w.name, func(ctx context.Context, length time.Duration) sample {
			return driveUpdates(ctx, w.way, goroutines, length)
		}})
	}
	r := b.measure(ctx, t)
	b.atLeast(0.97, r.ratio(ours, rawOneTrip), fmt.Sprintf("of raw one-trip begin, goroutines: %d", goroutines))
	b.atLeast(1.25, r.ratio(ours, crdbPgx), fmt.Sprintf("x crdbpgxv5, goroutines: %d", goroutines))
}

func driveUpdates(ctx context.Context, w way, goroutines int, length time.Duration) sample {
	var attempts atomic.Int64
	before := load.CPUTime()
	l, err := load.Drive(ctx, goroutines, length, func(ctx context.Context, worker int) error {
		return update(ctx, w, worker, &attempts)
	})
	perTx := 1 / float64(l.Done)
	check(err)
	return sample{l.Rate, (load.CPUTime() - before).Seconds() * 1e6 * perTx, float64(attempts.Load()) * perTx}
}

func update(ctx context.Context, w way, worker int, attempts *atomic.Int64) error {
	id := ownAccount(worker)
	return w(ctx, id, func(ctx context.Context, tx pgx.Tx) error {
		attempts.Add(1)
		return addToAccount(ctx, tx, id)
	})
}

// accountBank returns what all parts run on.
func accountBank(ctx context.Context, b *bench) (*pgxpool.Pool, *txretry.Manager) {
	pool := b.postgres(ctx)
	must(pool.Exec(ctx, accountSQL))
	manager, err := txretry.New(pool, txretry.Config{})
	check(err)
	return pool, manager
}
