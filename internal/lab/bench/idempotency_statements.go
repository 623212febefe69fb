package main

import (
	"context"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/idempotency"
)

// statementCounter counts what a pool sends.
type statementCounter struct{ n atomic.Int64 }

func (c *statementCounter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.n.Add(1)
	return ctx
}

func (*statementCounter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (*statementCounter) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return ctx
}

func (c *statementCounter) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {
	c.n.Add(1)
}

func (*statementCounter) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

// extra returns how many statements more ours sends for a first run.
func (c *statementCounter) extra(ctx context.Context, alone, ours keeper) float64 {
	const runs = 100
	var counts [2]int64
	for i, k := range []keeper{alone, ours} {
		before := c.n.Load()
		for range runs {
			check(k.once(ctx, idempotency.NewKey()))
		}
		counts[i] = c.n.Load() - before
	}
	return float64(counts[1]-counts[0]) / runs
}

// tieredDatabase is a pool with the tables of the business and of the records.
func (b *bench) tieredDatabase(ctx context.Context) (*pgxpool.Pool, *statementCounter) {
	plain := b.postgres(ctx)
	must(plain.Exec(ctx, thingsTable+byHandTable))
	counter := &statementCounter{}
	cfg := plain.Config()
	cfg.ConnConfig.Tracer = counter
	pool := b.pool(ctx, cfg)
	return pool, counter
}
