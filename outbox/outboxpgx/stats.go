package outboxpgx

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

// Every part walks an index from its begin and stops at the limit. Of the waiting messages those are late
// that have failed, or that others hold up. $1 limit.
const statsSQL = `
SELECT
  least($1, waiting.held + (SELECT count(*) FROM (
     SELECT FROM {lanes} l CROSS JOIN LATERAL (
       SELECT FROM {outbox} o WHERE o.lane = l.lane AND o.seq >= l.floor AND o.published_at IS NULL AND o.due_at IS NULL ORDER BY o.seq LIMIT $1::int) r
     LIMIT $1) ready)),
  waiting.parked,
  (SELECT count(*) FROM (SELECT FROM {dead} ORDER BY died_at, seq LIMIT $1) dead),
  (extract(epoch FROM clock_timestamp() - least(waiting.oldest, (SELECT min(r.created_at) FILTER (WHERE isfinite(r.created_at)) FROM {lanes} l CROSS JOIN LATERAL (
     SELECT o.created_at FROM {outbox} o WHERE o.lane = l.lane AND o.seq >= l.floor AND o.published_at IS NULL AND o.due_at IS NULL ORDER BY o.seq LIMIT 1) r))) * 1000000)::bigint,
  lanes.leased, lanes.doubtful, CASE WHEN has_sequence_privilege('{sequence}', 'SELECT') THEN coalesce(pg_sequence_last_value('{sequence}'), 0) ELSE 0 END
FROM (SELECT count(*) FILTER (WHERE held) AS held, count(*) FILTER (WHERE NOT held) AS parked,
             min(created_at) FILTER (WHERE (held OR attempts > 0) AND isfinite(created_at)) AS oldest
      FROM (SELECT held, attempts, created_at FROM {outbox} WHERE published_at IS NULL AND due_at IS NOT NULL ORDER BY due_at LIMIT $1) w) waiting,
     (SELECT count(*) FILTER (WHERE token IS NOT NULL AND lease_until > now()) AS leased,
             count(*) FILTER (WHERE suspect IS NOT NULL OR token IS NOT NULL AND lease_until <= now()) AS doubtful FROM {lanes}) lanes`

// Depth implements driver.Measured. The oldest age is that of the message stored first in each lane, and
// of the waiting ones that are counted; what lies below a floor that is wrong is not seen
// until a claim has put the floor right. What was stored is told to roles that may read the sequence of the
// table. With 100,000 messages or more of a kind it takes
// some 0.3 s of the database: ask every few seconds, not more often.
func (s *Store) Depth(ctx context.Context) (driver.Depth, error) {
	var stats driver.Depth
	var oldest *int64
	queue := &pgx.Batch{}
	queue.Queue(beginSQL)
	queue.Queue(settingsSQL)
	queue.Queue(s.t.fill(statsSQL), driver.StatsLimit).QueryRow(func(row pgx.Row) error {
		return row.Scan(&stats.Ready, &stats.Parked, &stats.Dead, &oldest, &stats.Leased, &stats.Doubtful, &stats.Stored)
	})
	queue.Queue(commitSQL)
	if err := s.send(ctx, queue); err != nil {
		return driver.Depth{}, fmt.Errorf("outboxpgx: stats: %w", s.t.explain(err))
	}
	if oldest != nil {
		stats.OldestAge = max(0, time.Duration(*oldest)*time.Microsecond)
	}
	return stats, nil
}
