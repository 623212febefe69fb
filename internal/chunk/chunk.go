// Package chunk deletes many rows in short transactions.
package chunk

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgcall"
)

// timeout bounds one transaction.
const timeout = 30 * time.Second

// Delete repeats a DELETE of at most size rows until one deletes fewer, each in a transaction of
// its own, and returns how many rows went, also with an error. The last parameter of sql is size. A
// transaction that is not answered within 30 s is tried once more, on another connection; what the
// first one deleted is not counted then.
//
// It works at READ COMMITTED, whatever the database's default: in a stricter transaction a row
// that another process has just deleted is an error.
func Delete(ctx context.Context, pool *pgxpool.Pool, size int, sql string, args ...any) (int64, error) {
	args = append(args, size)
	var total int64
	for {
		var n int64
		err := pgcall.Twice(ctx, pool, timeout, func(ctx context.Context, conn *pgxpool.Conn) (err error) {
			n, err = exec(ctx, conn, sql, args)
			return err
		})
		total += n
		if err != nil || n < int64(size) {
			return total, err
		}
	}
}

// Exec runs one statement in a transaction at READ COMMITTED and returns how many rows it
// changed; with an error none. It has 30 s.
func Exec(ctx context.Context, pool *pgxpool.Pool, sql string, args ...any) (n int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	err = pgcall.Use(ctx, pool, func(ctx context.Context, conn *pgxpool.Conn) (err error) {
		n, err = exec(ctx, conn, sql, args)
		return err
	})
	return n, err
}

// exec takes one round trip, so that no lock outlives a connection that falls silent.
func exec(ctx context.Context, conn *pgxpool.Conn, sql string, args []any) (n int64, err error) {
	queue := &pgx.Batch{}
	queue.Queue(`BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE`)
	queue.Queue(sql, args...).Exec(func(tag pgconn.CommandTag) error {
		n = tag.RowsAffected()
		return nil
	})
	queue.Queue(`COMMIT`)
	if err := conn.SendBatch(ctx, queue).Close(); err != nil {
		return 0, err
	}
	return n, nil
}
