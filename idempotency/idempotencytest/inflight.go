package idempotencytest

import (
	"context"
	"time"
)

// InFlight returns how many claims are held now. It is always exact.
func (s *Store) InFlight(context.Context) (n int, exact bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	for _, r := range s.records {
		if !r.completed && now.Before(r.expires) {
			n++
		}
	}
	return n, true, nil
}
