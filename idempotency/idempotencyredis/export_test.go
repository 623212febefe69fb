package idempotencyredis

import (
	"context"
	"time"
)

// InFlightOf is InFlight of at most so many keys of each node, for at most so long.
func (s *Store) InFlightOf(ctx context.Context, most int, bound time.Duration) (n int, exact bool, err error) {
	found, err := s.inFlight(ctx, most, bound)
	return found.count, !found.estimated, err
}
