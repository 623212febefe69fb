package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/lab/backlog"
)

// snapshotBacklog is how many times -messages a backlog has, so that dead rows pile up.
const snapshotBacklog = 3

// benchSnapshot drains without a broker, beside a session that holds an old snapshot: until it ends
// no row that was deleted can be cleaned up, and whoever reads from the start reads all of them
// again and again.
func benchSnapshot(ctx context.Context, b *bench) {
	d := newStore(ctx, b)
	ways := []struct {
		name  string
		fill  func(ctx context.Context, n int)
		drain func(ctx context.Context, n int, watch *stopwatch)
	}{
		{readAndDelete, d.fillRaw, d.rawClaimAll},
		{claimAlone, d.fillUnkeyed, d.claimAll},
		{unkeyed, d.fillUnkeyed, func(ctx context.Context, n int, watch *stopwatch) {
			check(d.relay(ctx, backlog.Confirms{}, n, watch, func(int) {}))
		}},
	}
	t := table{
		title:   fmt.Sprintf("outbox, %d messages, no broker, beside an old snapshot", snapshotBacklog*b.messages),
		columns: []column{{name: "messages/s"}, {name: "client us/message", decimals: 1}},
	}
	const beside = ", old snapshot"
	for _, w := range ways {
		row := func(name string, drain func(context.Context, int, *stopwatch)) {
			t.contenders = append(t.contenders, d.contender(name, 1, func(ctx context.Context, n int, watch *stopwatch) int {
				w.fill(ctx, n)
				drain(ctx, n, watch)
				return 0
			}))
		}
		row(w.name, w.drain)
		row(w.name+beside, d.besideSnapshot(w.drain))
	}
	longer := *b
	longer.messages *= snapshotBacklog
	d.bench = &longer
	r := b.measure(ctx, t)
	for _, w := range ways[1:] {
		b.atLeast(0.9, r.ratio(w.name+beside, w.name), "of the rate without an old snapshot, "+w.name)
	}
}

func (d *drain) fillUnkeyed(ctx context.Context, n int) { d.fill(ctx, n, 0) }

// besideSnapshot has a transaction look once before the drain, and stay open.
func (d *drain) besideSnapshot(drain func(context.Context, int, *stopwatch)) func(context.Context, int, *stopwatch) {
	return func(ctx context.Context, n int, watch *stopwatch) {
		tx := must(d.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}))
		must(tx.Exec(ctx, "SELECT"))
		drain(ctx, n, watch)
		check(tx.Rollback(ctx))
	}
}
