package main

import (
	"context"
	"fmt"
	"net/http"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/txretry"
)

// benchAlone tells what exactly once costs without a gate beside the business transaction alone, and what
// a replay costs beside a SELECT.
func benchAlone(ctx context.Context, b *bench) {
	pool := b.postgres(ctx)
	must(pool.Exec(ctx, thingsTable+"CREATE TABLE raw (key text PRIMARY KEY, body bytea)"))
	manager := must(txretry.New(pool, txretry.Config{}))
	store := must(idempotencypgx.New(manager, idempotencypgx.Config{}))
	check(store.Migrate(ctx))
	alone, look := over(transactionOnly, transactionHandler(manager)), keeper{rawPostgresLook, rawPostgres(pool)}
	ours := over(oursAlone, behind(store, store.Handler(func(ctx context.Context, tx pgx.Tx, _ *http.Request) (idempotency.Response, error) {
		return created, insertThing(ctx, tx)
	})))
	for _, clients := range []int{8, 50} {
		for _, c := range []struct {
			kind      string
			raw, ours contender
		}{
			{"first run", alone.firstRuns(clients), ours.firstRuns(clients)},
			{"replay", look.replays(clients), ours.replays(clients)},
		} {
			title := fmt.Sprintf("%s, clients: %d", c.kind, clients)
			r := b.measure(ctx, table{
				title: "idempotency without a gate, " + title, columns: requestColumns,
				contenders: []contender{c.raw, c.ours}, yardsticks: []string{c.raw.name},
			})
			b.atLeast(0.8, r.ratio(oursAlone, c.raw.name), fmt.Sprintf("of %s, no gate, %s", c.raw.name, title))
		}
	}
}
