package expiry

import (
	"sync"
	"time"
)

// quarantine lists the rows that failed on their own, and when they may be
// tried again.
type quarantine struct {
	period time.Duration
	limit  int

	mu    sync.Mutex
	until map[string]time.Time
}

func newQuarantine(period time.Duration, limit int) *quarantine {
	return &quarantine{period: period, limit: limit, until: map[string]time.Time{}}
}

// add reports false when the list is full.
func (q *quarantine) add(id string, now time.Time) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.until) >= q.limit {
		return false
	}
	q.until[id] = now.Add(q.period)
	return true
}

// current forgets whose time has come and returns the others, with the time
// left to the first of them.
func (q *quarantine) current(now time.Time) (ids []string, release time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for id, until := range q.until {
		left := until.Sub(now)
		if left <= 0 {
			delete(q.until, id)
			continue
		}
		if len(ids) == 0 || left < release {
			release = left
		}
		ids = append(ids, id)
	}
	return ids, release
}
