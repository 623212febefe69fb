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
func (d *drain) claimAlone(ctx context.Context, n int, watch *stopwatch) (int, error) {
	if err := d.fill(ctx, n, 0); err != nil {
		return 0, err
	}
	return 0, d.claimAll(ctx, n, watch)
}

func (d *drain) claimAll(ctx context.Context, n int, watch *stopwatch) error {
	watch.start()
	for done := 0; done < n; {
		batch, err := d.store.Claim(ctx, driver.Claim{Limit: claimSize, Lease: 30 * time.Second})
		if err != nil {
			return err
		}
		outcomes := make([]driver.Settlement, len(batch.Messages))
		for i, m := range batch.Messages {
			outcomes[i] = driver.Settlement{ID: m.ID, Verdict: driver.Published}
		}
		if _, err := d.store.Settle(ctx, batch, outcomes); err != nil {
			return err
		}
		done += len(outcomes)
	}
	watch.stop()
	return nil
}

const rawBacklogSQL = `CREATE TABLE raw_backlog (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text NOT NULL, body bytea NOT NULL)`

// rawClaim is the database's limit: one reader, with nothing to tell it from others, reads past
// the last row it saw, and deletes.
func (d *drain) rawClaim(ctx context.Context, n int, watch *stopwatch) (int, error) {
	if err := d.fillRaw(ctx, n); err != nil {
		return 0, err
	}
	return 0, d.rawClaimAll(ctx, n, watch)
}

func (d *drain) fillRaw(ctx context.Context, n int) error {
	if _, err := d.pool.Exec(ctx, "INSERT INTO raw_backlog (name, body) SELECT $2::text, $3::bytea FROM generate_series(1, $1::int)", n, d.queue, body); err != nil {
		return err
	}
	_, err := d.pool.Exec(ctx, "VACUUM (ANALYZE) raw_backlog")
	return err
}

func (d *drain) rawClaimAll(ctx context.Context, n int, watch *stopwatch) error {
	type row struct {
		ID   int64
		Name string
		Body []byte
	}
	watch.start()
	last := int64(0)
	for done := 0; done < n; {
		rows, err := d.pool.Query(ctx, "SELECT id, name, body FROM raw_backlog WHERE id > $1 ORDER BY id LIMIT $2", last, claimSize)
		if err != nil {
			return err
		}
		read, err := pgx.CollectRows(rows, pgx.RowToStructByPos[row])
		if err != nil {
			return err
		}
		ids := make([]int64, len(read))
		for i, r := range read {
			ids[i], last = r.ID, r.ID
		}
		if _, err := d.pool.Exec(ctx, "DELETE FROM raw_backlog WHERE id = ANY($1)", ids); err != nil {
			return err
		}
		done += len(read)
	}
	watch.stop()
	return nil
}
