package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"

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

// Names of contenders that goals refer to.
const (
	rawOneTrip = "raw pgx, one-trip begin"
	crdbPgx    = "crdbpgxv5.ExecuteTx"
	ours       = "txretry"
)

const (
	accounts          = 10_000
	accountsPerWorker = 300 // each worker has its own where nobody contends
)

const accountSQL = `CREATE TABLE account (id int PRIMARY KEY, v bigint NOT NULL) WITH (fillfactor = 50)`

// resetAccounts makes every run start from the same table.
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

// way is one way to run work in a SERIALIZABLE transaction with a lock timeout,
// again after a conflict. The account is what callers may contend for.
type way func(ctx context.Context, account int, fn work) error

// beginOneTrip is the begin that txretry sends.
const beginOneTrip = "begin isolation level serializable; set local lock_timeout = '8000ms'"

// oneTrip repeats the transaction until it is not the victim of a conflict.
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

// crdbExecuteTx gives the peer the one-trip begin as well.
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

// gaveUp marks the error of a call whose attempts are used up.
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
