package outboxpgx

import (
	"context"
	"fmt"
	"time"
)

const depthSQL = `
SELECT (SELECT count(*) FROM {outbox} WHERE published_at IS NULL AND due_at IS NULL),
       (SELECT count(*) FROM {outbox} WHERE published_at IS NULL AND due_at IS NOT NULL),
       (SELECT count(*) FROM {dead}),
       (SELECT extract(epoch FROM clock_timestamp() - min(created_at))::float8 FROM {outbox} WHERE published_at IS NULL)`

// Stats is the state of the table.
type Stats struct {
	// Ready messages can be published now, those behind a parked one of their key included; Parked
	// ones wait for their first or next attempt.
	Ready, Parked int64
	// Dead counts the dead letters.
	Dead int64
	// OldestAge is the age of the oldest message that is not published; 0: there is none.
	OldestAge time.Duration
}

// Stats counts. It reads all rows that are not published: ask every few seconds, not more often.
func (s *Source) Stats(ctx context.Context) (Stats, error) {
	var stats Stats
	var seconds *float64
	err := s.pool.QueryRow(ctx, s.t.fill(depthSQL)).Scan(&stats.Ready, &stats.Parked, &stats.Dead, &seconds)
	if err != nil {
		return Stats{}, fmt.Errorf("outboxpgx: stats: %w", err)
	}
	if seconds != nil {
		stats.OldestAge = time.Duration(*seconds * float64(time.Second))
	}
	return stats, nil
}
