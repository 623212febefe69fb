package idempotencyredis

import "context"

// InFlightOf is InFlight of at most so many keys of each node.
func (s *Store) InFlightOf(ctx context.Context, most int) (n int, exact bool, err error) {
	found, err := s.inFlight(ctx, most)
	return found.count, !found.estimated, err
}
