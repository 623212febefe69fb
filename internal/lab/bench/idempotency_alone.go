package main

import (
	"context"
	"fmt"
	"net/http"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/txretry"
)

// aloneKeys is a business transaction, alone and under keys that Postgres alone keeps.
type aloneKeys struct {
	alone, hand, ours keeper
	look              keeper // a SELECT of what is kept
}

func newAloneKeys(ctx context.Context, pool *pgxpool.Pool) (k aloneKeys) {
	manager := must(txretry.New(pool, txretry.Config{}))
	store := must(idempotencypgx.New(manager, idempotencypgx.Config{}))
	check(store.Migrate(ctx))
	ours := behind(store, store.Handler(func(ctx context.Context, tx pgx.Tx, _ *http.Request) (idempotency.Response, error) {
		return created, insertThing(ctx, tx)
	}))
	return aloneKeys{
		alone: over(transactionOnly, transactionHandler(manager)), hand: over(keptByHand, handKept{pool}), ours: over(oursAlone, ours),
		look: keeper{rawPostgresLook, rawPostgres(pool)},
	}
}

// benchAlone tells what exactly once costs without a gate beside the business transaction alone, and what
// a replay costs beside a SELECT.
func benchAlone(ctx context.Context, b *bench) {
	pool := b.postgres(ctx)
	must(pool.Exec(ctx, thingsTable+byHandTable+"CREATE TABLE raw (key text PRIMARY KEY, body bytea)"))
	keys := newAloneKeys(ctx, pool)
	for _, clients := range []int{8, 50} {
		b.compareAlone(ctx, keys, clients)
	}
}

func (b *bench) compareAlone(ctx context.Context, k aloneKeys, clients int) {
	for _, c := range []struct {
		kind string
		rows []contender
	}{
		{"first run", []contender{k.alone.firstRuns(clients), k.hand.firstRuns(clients), k.ours.firstRuns(clients)}},
		{"replay", []contender{k.look.replays(clients), k.ours.replays(clients)}},
	} {
		title := fmt.Sprintf("%s, clients: %d", c.kind, clients)
		yardstick := c.rows[0].name
		yardsticks := []string{yardstick}
		if c.rows[1].name == keptByHand {
			yardsticks = append(yardsticks, keptByHand)
		}
		r := b.measure(ctx, table{
			title: "idempotency without a gate, " + title, columns: requestColumns, contenders: c.rows, yardsticks: yardsticks,
		})
		b.atLeast(0.8, r.ratio(oursAlone, yardstick), fmt.Sprintf("of %s, no gate, %s", yardstick, title))
	}
}
