package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/cockroach-go/v2/crdb/crdbpgxv5"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/lab/load"
	"github.com/holdfast-go/holdfast/txretry"
)

func txretryWorkload() workload {
	return workload{"txretry", []part{
		{"update", benchUpdate},
		{"contended", benchContended},
	}}
}

// Names of contenders that a table, a goal and a reason share.
const (
	rawOneTrip = "raw pgx, one-trip begin"
	crdbPgx    = "crdbpgxv5.ExecuteTx"
	ours       = "txretry"
)

const (
	accounts          = 10_000
	accountsPerWorker = 300 // each worker has its own accounts in runs without contention
)

const accountSQL = `CREATE TABLE account (id int PRIMARY KEY, v bigint NOT NULL) WITH (fillfactor = 50)`

// resetAccounts makes every run start with the same table.
func resetAccounts(ctx context.Context, pool *pgxpool.Pool) error {
	_, err := pool.Exec(ctx, fmt.Sprintf("TRUNCATE account; INSERT INTO account SELECT g, 0 FROM generate_series(1, %d) g", accounts))
	if err == nil {
		_, err = pool.Exec(ctx, "VACUUM (ANALYZE) account")
	}
	return err
}

func ownAccount(worker int) int { return 1 + worker*accountsPerWorker + rand.IntN(accountsPerWorker) }

func addToAccount(ctx context.Context, tx pgx.Tx, id int) error {
	_, err := tx.Exec(ctx, "UPDATE account SET v = v + 1 WHERE id = $1", id)
	return err
}

// work is the body of a transaction.
type work func(ctx context.Context, tx pgx.Tx) error

// way runs work in a SERIALIZABLE transaction with a lock timeout, and again after a conflict.
// account is the row that callers may contend for.
type way func(ctx context.Context, account int, fn work) error

// beginOneTrip is the begin that txretry sends.
const beginOneTrip = "begin isolation level serializable; set local lock_timeout = '8000ms'"

// oneTrip repeats the transaction until it succeeds without a conflict.
func oneTrip(pool *pgxpool.Pool) way {
	return func(ctx context.Context, _ int, fn work) error {
		for {
			err := pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{BeginQuery: beginOneTrip}, func(tx pgx.Tx) error { return fn(ctx, tx) })
			if !isConflict(err) {
				return err
			}
		}
	}
}

func isConflict(err error) bool {
	if err == nil {
		return false
	}
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && (pgErr.Code == "40001" || pgErr.Code == "40P01")
}

// crdbExecuteTx gives the peer the same one-trip begin.
func crdbExecuteTx(pool *pgxpool.Pool) way {
	return func(ctx context.Context, _ int, fn work) error {
		return crdbpgx.ExecuteTx(ctx, pool, pgx.TxOptions{BeginQuery: beginOneTrip}, func(tx pgx.Tx) error { return fn(ctx, tx) })
	}
}

func managed(m *txretry.Manager) way {
	return func(ctx context.Context, _ int, fn work) error { return gaveUp(m.Do(ctx, fn)) }
}

func managedInTurn(m *txretry.Manager) way {
	keys := make([]string, accounts+1)
	for id := range keys {
		keys[id] = fmt.Sprintf("account:%d", id)
	}
	return func(ctx context.Context, account int, fn work) error {
		return gaveUp(m.DoWith(ctx, txretry.Options{SerialKey: keys[account]}, fn))
	}
}

// gaveUp marks the error of a call that used up its attempts.
func gaveUp(err error) error {
	if err == nil {
		return nil
	}
	var exhausted *txretry.LockTimeoutError
	if errors.As(err, &exhausted) {
		return load.ErrGaveUp
	}
	return err
}

const (
	sequential = "one connection, in sequence"
	inTurn     = "txretry, SerialKey"
)

// hotAccount is the account that all contend for.
const hotAccount = 1

// benchContended makes 32 goroutines read and then write one account.
func benchContended(ctx context.Context, b *bench) {
	const goroutines = 32
	pool, manager := accountBank(ctx, b)
	under := func(w way, goroutines int) func(context.Context, time.Duration) sample {
		return func(ctx context.Context, length time.Duration) sample {
			return contend(ctx, pool, w, goroutines, length)
		}
	}
	b.measure(ctx, table{
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

// benchUpdate runs one UPDATE by key per transaction, without contention.
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
	b.measure(ctx, t)
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

// accountBank returns the pool and the manager for all parts.
func accountBank(ctx context.Context, b *bench) (*pgxpool.Pool, *txretry.Manager) {
	pool := b.postgres(ctx)
	must(pool.Exec(ctx, accountSQL))
	manager, err := txretry.New(pool, txretry.Config{})
	check(err)
	return pool, manager
}
