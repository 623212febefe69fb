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
	pool, manager := accountBank(ctx, b)
	resolving := must(txretry.New(pool, txretry.Config{XactStatus: true}))
	ways := []struct {
		name string
		way  way
	}{
		{rawFourTrips, fourTrips(pool)},
		{rawOneTrip, oneTrip(pool, nil)},
		{crdbPgx, crdbExecuteTx(pool)},
		{ours, managed(manager)},
		{"txretry, XactStatus", managed(resolving)},
	}
	for _, goroutines := range []int{1, 8, 32} {
		t := table{
			title:      fmt.Sprintf("txretry, one UPDATE by key, goroutines: %d", goroutines),
			columns:    []column{{name: "tx/s"}, {name: "client us/tx", decimals: 1}, {name: "attempts/tx", decimals: 4}},
			prepare:    func(ctx context.Context) error { return resetAccounts(ctx, pool) },
			yardsticks: []string{rawFourTrips, rawOneTrip, crdbPgx},
		}
		for _, w := range ways {
			t.contenders = append(t.contenders, contender{w.name, func(ctx context.Context, length time.Duration) sample {
				return driveUpdates(ctx, w.way, goroutines, length)
			}})
		}
		r := b.measure(ctx, t)
		b.atLeast(0.97, r.ratio(ours, rawOneTrip), fmt.Sprintf("of raw one-trip begin, goroutines: %d", goroutines))
		if goroutines == 8 {
			b.atLeast(1.25, r.ratio(ours, crdbPgx), "x crdbpgxv5, goroutines: 8")
		}
	}
	countAllocations(ctx, b, ways[1].way, ways[3].way)
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

func countAllocations(ctx context.Context, b *bench, raw, managed way) {
	const calls = 2000
	var attempts atomic.Int64
	rawAllocs := must(allocations(calls, func() error { return update(ctx, raw, 0, &attempts) }))
	allocs := must(allocations(calls, func() error { return update(ctx, managed, 0, &attempts) }))
	fmt.Fprintf(b.out, "\nallocations per call: %s %.1f, %s %.1f\n", rawOneTrip, rawAllocs, ours, allocs)
	b.atMost(6, exactly(allocs-rawAllocs), "allocations per call beyond raw one-trip begin")
}

// accountBank returns what all parts run on.
func accountBank(ctx context.Context, b *bench) (*pgxpool.Pool, *txretry.Manager) {
	pool := b.postgres(ctx)
	must(pool.Exec(ctx, accountSQL))
	manager, err := txretry.New(pool, txretry.Config{})
	check(err)
	return pool, manager
}
