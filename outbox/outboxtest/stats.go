package outboxtest

import (
	"context"
	"time"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

// Depth implements driver.Measured.
func (s *Store) Depth(ctx context.Context) (driver.Depth, error) {
	if err := ctx.Err(); err != nil {
		return driver.Depth{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	stats := driver.Depth{Dead: len(s.dead), Stored: int64(s.seq)}
	for i := range s.lanes {
		l := &s.lanes[i]
		leased := now.Before(l.until)
		if leased {
			stats.Leased++
		}
		if l.suspect > 0 || l.lost() && !leased {
			stats.Doubtful++
		}
	}
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
	for _, n := range []*int{&stats.Ready, &stats.Parked, &stats.Dead} {
		*n = min(*n, driver.StatsLimit)
	}
	return stats, nil
}
