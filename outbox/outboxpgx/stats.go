package outboxpgx

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/outbox"
)

// statsWaiting is at how many waiting messages Stats looks for the oldest.
const statsWaiting = 1000

// Every part walks an index from its begin and stops at the limit. $1 limit, $2 waiting messages.
const statsSQL = `
SELECT
  least($1, waiting.held + (SELECT count(*) FROM (
     SELECT FROM {lanes} l CROSS JOIN LATERAL (
       SELECT FROM {outbox} o WHERE o.lane = l.lane AND o.seq >= l.floor AND o.published_at IS NULL AND o.due_at IS NULL ORDER BY o.seq LIMIT $1::int) r
     LIMIT $1) ready)),
  waiting.parked,
  (SELECT count(*) FROM (SELECT FROM {dead} ORDER BY died_at, seq LIMIT $1) dead),
  (SELECT (extract(epoch FROM clock_timestamp() - min(created_at) FILTER (WHERE isfinite(created_at))) * 1000000)::bigint FROM (
     SELECT r.created_at FROM {lanes} l CROSS JOIN LATERAL (
       SELECT o.created_at FROM {outbox} o WHERE o.lane = l.lane AND o.seq >= l.floor AND o.published_at IS NULL AND o.due_at IS NULL ORDER BY o.seq LIMIT 1) r
     UNION ALL
     SELECT created_at FROM (
       SELECT created_at, attempts FROM {outbox} WHERE published_at IS NULL AND due_at IS NOT NULL ORDER BY due_at LIMIT $2::int) p
     WHERE attempts > 0) oldest)
FROM (SELECT count(*) FILTER (WHERE held) AS held, count(*) FILTER (WHERE NOT held) AS parked
      FROM (SELECT held FROM {outbox} WHERE published_at IS NULL AND due_at IS NOT NULL ORDER BY due_at LIMIT $1) w) waiting`

// Stats meets outbox.Measured. The oldest age is that of the message stored first in each lane, and
// of the 1,000 waiting messages that are due first; what lies below a floor that is wrong is not seen
// until a claim has put the floor right. With 100,000 messages or more of a kind it takes
// some 0.3 s of the database: ask every few seconds, not more often.
func (s *Source) Stats(ctx context.Context) (outbox.StoreStats, error) {
	var stats outbox.StoreStats
	var oldest *int64
	queue := &pgx.Batch{}
	queue.Queue(beginSQL)
	queue.Queue(s.sql.setup)
	queue.Queue(s.t.fill(statsSQL), outbox.StatsLimit, statsWaiting).QueryRow(func(row pgx.Row) error {
		return row.Scan(&stats.Ready, &stats.Parked, &stats.Dead, &oldest)
	})
	queue.Queue(commitSQL)
	if err := s.send(ctx, queue); err != nil {
		return outbox.StoreStats{}, fmt.Errorf("outboxpgx: stats: %w", s.t.explain(err))
	}
	if oldest != nil {
		stats.OldestAge = max(0, time.Duration(*oldest)*time.Microsecond)
	}
	return stats, nil
}
