package idempotencyredis

import "context"

// InFlightOf is InFlight of at most so many keys of each node.
func (s *Store) InFlightOf(ctx context.Context, most int) (int, error) { return s.inFlight(ctx, most) }
