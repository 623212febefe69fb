package idempotencypgx

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/breaker"
	"github.com/holdfast-go/holdfast/internal/migrate"
	"github.com/holdfast-go/holdfast/internal/pgcall"
)

// asker sends single statements, each of which may be repeated, so that a
// connection on which the server is silent costs a short wait.
type asker struct {
	pool    *pgxpool.Pool
	reserve *pgcall.Reserve // for renewals
	server  *breaker.Server
	missing migrate.Missing
}

func newAsker(pool *pgxpool.Pool, table string) *asker {
	a := &asker{pool: pool, reserve: pgcall.NewReserve(pool), missing: migrate.Missing{Call: "Migrate of the idempotencypgx.Store", Tables: []string{table}}}
	a.server = breaker.NewServer(answered, func(context.Context) { pgcall.Sweep(pool, breaker.Longest) })
	return a
}

// answered reports whether an error is Postgres's own answer.
func answered(err error) bool {
	_, ok := errors.AsType[*pgconn.PgError](err)
	return ok || errors.Is(err, pgx.ErrNoRows)
}

// ask calls fn until Postgres answers. With guarded it spares a server that has not
// answered lately.
func (a *asker) ask(ctx context.Context, guarded bool, fn func(ctx context.Context, conn *pgxpool.Conn) error) error {
	err := a.server.Ask(ctx, guarded, func(ctx context.Context) error { return pgcall.Use(ctx, a.pool, fn) })
	return a.missing.Explain(err)
}

// exec is ask for a statement that returns nothing but how many rows it changed.
func (a *asker) exec(ctx context.Context, guarded bool, sql string, args ...any) (rows int64, err error) {
	err = a.ask(ctx, guarded, func(ctx context.Context, conn *pgxpool.Conn) error {
		tag, err := conn.Exec(ctx, sql, args...)
		rows = tag.RowsAffected()
		return err
	})
	return rows, err
}

// renew is exec for a statement that renews a lease: it does not wait for the pool, whose connections the work under
// the leases may hold.
func (a *asker) renew(ctx context.Context, sql string, args ...any) (rows int64, err error) {
	err = a.server.Ask(ctx, false, func(ctx context.Context) error {
		return a.reserve.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
			tag, err := conn.Exec(ctx, sql, args...)
			rows = tag.RowsAffected()
			return err
		})
	})
	return rows, a.missing.Explain(err)
}
