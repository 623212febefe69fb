// Package chunk deletes many rows in short transactions.
package chunk

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Delete repeats a DELETE of at most size rows until one deletes fewer, each in a transaction of
// its own, and returns how many rows went, also with an error. The last parameter of sql is size.
//
// It works at READ COMMITTED, whatever the database's default: in a stricter transaction a row
// that another process has just deleted is an error.
func Delete(ctx context.Context, pool *pgxpool.Pool, size int, sql string, args ...any) (int64, error) {
	args = append(args, size)
	var total int64
	for {
		n, err := Exec(ctx, pool, sql, args...)
		total += n
		if err != nil || n < int64(size) {
			return total, err
		}
	}
}

// Exec runs one statement in a transaction at READ COMMITTED and returns how many rows it
// changed; with an error none.
func Exec(ctx context.Context, pool *pgxpool.Pool, sql string, args ...any) (n int64, err error) {
	err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, sql, args...)
		n = tag.RowsAffected()
		return err
	})
	if err != nil {
		return 0, err
	}
	return n, nil
}
