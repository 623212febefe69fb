package pgcall

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// execTimeout bounds one Exec.
const execTimeout = 30 * time.Second

// Exec runs one statement in a transaction at READ COMMITTED, whatever the database's default, and
// returns how many rows it changed; with an error none. It has 30 s. It takes one round trip, so that
// no lock outlives a connection that falls silent.
func Exec(ctx context.Context, pool *pgxpool.Pool, sql string, args ...any) (n int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, execTimeout)
	defer cancel()
	err = Use(ctx, pool, func(ctx context.Context, conn *pgxpool.Conn) error {
		queue := &pgx.Batch{}
		queue.Queue(`BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE`)
		queue.Queue(sql, args...).Exec(func(tag pgconn.CommandTag) error {
			n = tag.RowsAffected()
			return nil
		})
		queue.Queue(`COMMIT`)
		return conn.SendBatch(ctx, queue).Close()
	})
	if err != nil {
		return 0, err
	}
	return n, nil
}
