package main

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/txretry"
)

// aloneKeys is a business transaction, alone and under keys that Postgres alone keeps.
type aloneKeys struct {
	alone, hand, ours keeper
	own               keeper // with a handler around Do, so that the middleware asks first
	look              keeper // a SELECT of what is kept
}

func newAloneKeys(ctx context.Context, pool *pgxpool.Pool) (k aloneKeys) {
	manager := must(txretry.New(pool, txretry.Config{}))
	store := must(idempotencypgx.New(manager, idempotencypgx.Config{}))
	check(store.Migrate(ctx))
	ours := behind(store, store.Handler(func(ctx context.Context, tx pgx.Tx, _ *http.Request) (idempotency.Response, error) {
		return created, insertThing(ctx, tx)
	}))
	own := behind(store, doHandler(store))
	return aloneKeys{
		alone: over(transactionOnly, transactionHandler(manager)), hand: over(keptByHand, handKept{pool: pool}), ours: over(oursAlone, ours), own: over("holdfast, no gate, own handler", own),
		look: keeper{rawPostgresLook, rawPostgres(pool, true)},
	}
}

// benchAlone tells what exactly once costs without a gate beside the business transaction alone, and what
// a replay costs beside a SELECT: where the two cores are the limit, and where the trips are.
func benchAlone(ctx context.Context, b *bench) {
	pool, _ := b.tieredDatabase(ctx)
	must(pool.Exec(ctx, "CREATE TABLE raw (key text PRIMARY KEY, body bytea)"))
	const trip = time.Millisecond
	far := b.far(ctx, pool, trip)
	near := newAloneKeys(ctx, pool)
	distant := newAloneKeys(ctx, far)
	for _, clients := range []int{1, 8, 50} {
		b.compareAlone(ctx, near, clients, "")
	}
	b.compareAlone(ctx, distant, 8, fmt.Sprintf(", %v more per trip", trip))
}

func (b *bench) compareAlone(ctx context.Context, k aloneKeys, clients int, where string) {
	for _, c := range []struct {
		kind string
		rows []contender
	}{
		{"first run", []contender{k.alone.firstRuns(clients), k.hand.firstRuns(clients), k.ours.firstRuns(clients), k.own.firstRuns(clients)}},
		{"replay", []contender{k.look.replays(clients), k.ours.replays(clients)}},
	} {
		title := fmt.Sprintf("%s, clients: %d%s", c.kind, clients, where)
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
