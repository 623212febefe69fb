package main

import (
	"context"
	"time"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

// claimSize is the default of outbox.RelayConfig.BatchSize.
const claimSize = 500

// claimAlone is the database's share of a drain, one batch after the other.
func (d *drain) claimAlone(ctx context.Context, n int, watch *stopwatch) int {
	d.fill(ctx, n, 0)
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
	return 0
}
