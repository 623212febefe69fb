package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

// claimSize is the default of outbox.RelayConfig.BatchSize.
const claimSize = 500

// claimAlone is the database's share of a drain, one batch after the other.
func (d *drain) claimAlone(ctx context.Context, n int, watch *stopwatch) int {
	d.fill(ctx, n, 0)
	d.claimAll(ctx, n, watch)
	return 0
}

func (d *drain) claimAll(ctx context.Context, n int, watch *stopwatch) {
	watch.start()
	for done := 0; done < n; {
		batch := must(d.store.Claim(ctx, driver.Claim{Limit: claimSize, Lease: 30 * time.Second}))
		outcomes := make([]driver.Settlement, len(batch.Messages))
		for i, m := range batch.Messages {
			outcomes[i] = driver.Settlement{ID: m.ID, Verdict: driver.Published}
		}
		must(d.store.Settle(ctx, batch, outcomes))
		done += len(outcomes)
	}
	watch.stop()
}

const rawBacklogSQL = `CREATE TABLE raw_backlog (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text NOT NULL, body bytea NOT NULL)`

// rawClaim is the database's limit: one reader, with nothing to tell it from others, reads past
// the last row it saw, and deletes.
func (d *drain) rawClaim(ctx context.Context, n int, watch *stopwatch) int {
	d.fillRaw(ctx, n)
	d.rawClaimAll(ctx, n, watch)
	return 0
}

func (d *drain) fillRaw(ctx context.Context, n int) {
	must(d.pool.Exec(ctx, "INSERT INTO raw_backlog (name, body) SELECT $2::text, $3::bytea FROM generate_series(1, $1::int)", n, d.queue, body))
	_, err := d.pool.Exec(ctx, "VACUUM (ANALYZE) raw_backlog")
	check(err)
}

func (d *drain) rawClaimAll(ctx context.Context, n int, watch *stopwatch) {
	type row struct {
		ID   int64
		Name string
		Body []byte
	}
	watch.start()
	last := int64(0)
	for done := 0; done < n; {
		rows := must(d.pool.Query(ctx, "SELECT id, name, body FROM raw_backlog WHERE id > $1 ORDER BY id LIMIT $2", last, claimSize))
		read := must(pgx.CollectRows(rows, pgx.RowToStructByPos[row]))
		ids := make([]int64, len(read))
		for i, r := range read {
			ids[i], last = r.ID, r.ID
		}
		must(d.pool.Exec(ctx, "DELETE FROM raw_backlog WHERE id = ANY($1)", ids))
		done += len(read)
	}
	watch.stop()
}
