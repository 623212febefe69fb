package main

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/lab/load"
)

const (
	sequential = "one connection, in sequence"
	inTurn     = "txretry, SerialKey"
)

// hotAccount is the one that all contend for.
const hotAccount = 1

// benchContended has 32 goroutines read and then write one account.
func benchContended(ctx context.Context, b *bench) {
	const goroutines = 32
	pool, manager := accountBank(ctx, b)
	under := func(w way, goroutines int) func(context.Context, time.Duration) sample {
		return func(ctx context.Context, length time.Duration) sample {
			return contend(ctx, pool, w, goroutines, length)
		}
	}
	r := b.measure(ctx, table{
		title:      fmt.Sprintf("txretry, read then write one hot row, goroutines: %d", goroutines),
		columns:    []string{"commits/s", "attempts/commit", "p99 ms", "exhausted"},
		prepare:    func(ctx context.Context) error { return resetAccounts(ctx, pool) },
		yardsticks: []string{sequential},
		contenders: []contender{
			{sequential, under(oneTrip(pool), 1)},
			{inTurn, under(managedInTurn(manager), goroutines)},
			{ours, under(managed(manager), goroutines)},
		},
	})
	b.atLeast(0.8, r.ratio(inTurn, sequential), "of the sequential rate, SerialKey")
}

// contend makes one run and checks that no update was lost.
func contend(ctx context.Context, pool *pgxpool.Pool, w way, goroutines int, length time.Duration) sample {
	var attempts atomic.Int64
	l := must(load.Drive(ctx, goroutines, length, func(ctx context.Context, _ int) error {
		return w(ctx, hotAccount, func(ctx context.Context, tx pgx.Tx) error {
			attempts.Add(1)
			return readThenWrite(ctx, tx, hotAccount)
		})
	}))
	var total int
	check(pool.QueryRow(ctx, "SELECT sum(v) FROM account").Scan(&total))
	if total != l.Done {
		check(fmt.Errorf("%d commits, but %d updates in the table", l.Done, total))
	}
	return sample{l.Rate, float64(attempts.Load()) / float64(l.Done), milliseconds(l.Percentile(0.99)), float64(l.GaveUp)}
}

func readThenWrite(ctx context.Context, tx pgx.Tx, id int) error {
	var v int64
	if err := tx.QueryRow(ctx, "SELECT v FROM account WHERE id = $1", id).Scan(&v); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, "UPDATE account SET v = $2 WHERE id = $1", id, v+1)
	return err
}
