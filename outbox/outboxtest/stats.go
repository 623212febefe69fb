package outboxtest

import (
	"context"
	"time"

	"github.com/holdfast-go/holdfast/outbox"
)

// Stats meets outbox.Measured.
func (s *Store) Stats(ctx context.Context) (outbox.StoreStats, error) {
	if err := ctx.Err(); err != nil {
		return outbox.StoreStats{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	stats := outbox.StoreStats{Dead: int64(len(s.dead))}
	for _, e := range s.entries {
		if !e.committed {
			continue
		}
		if e.due.IsZero() {
			stats.Ready++
		} else {
			stats.Parked++
		}
		if e.due.IsZero() || e.Attempts > 0 {
			stats.OldestAge = max(stats.OldestAge, now.Sub(e.CreatedAt))
		}
	}
	for _, n := range []*int64{&stats.Ready, &stats.Parked, &stats.Dead} {
		*n = min(*n, outbox.StatsLimit)
	}
	return stats, nil
}
