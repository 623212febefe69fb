package idempotencyredis

import (
	"context"
	"fmt"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/internal/redisconn"
)

// Check looks for settings of the server under which records can vanish before
// their time, and for a client that waits for ever. The error says that it could
// not look, which it finds out within seconds.
func (s *Store) Check(ctx context.Context) ([]idempotency.Finding, error) {
	var found []idempotency.Finding
	err := s.server.Ask(ctx, false, func(ctx context.Context) (err error) {
		found, err = within(ctx, s.look)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("idempotencyredis: check: %w", err)
	}
	if heedsDeadlines, bounded := redisconn.Timeouts(s.client); !heedsDeadlines && !bounded {
		found = append(found, idempotency.Finding{
			Component: "idempotencyredis",
			Problem:   "the client waits for ever for a connection that has fallen silent, and loses it for its pool",
			Mend:      "set ContextTimeoutEnabled of the client's options, or a ReadTimeout",
		})
	}
	return found, nil
}

func (s *Store) look(ctx context.Context) ([]idempotency.Finding, error) {
	info, err := s.client.InfoMap(ctx, "memory").Result()
	if err != nil {
		return nil, err
	}
	memory := info["Memory"]
	policy := memory["maxmemory_policy"]
	if memory["maxmemory"] == "0" || policy == "" || policy == "noeviction" {
		return nil, nil
	}
	return []idempotency.Finding{{
		Component: "idempotencyredis",
		Problem:   "maxmemory-policy is " + policy + ": a full server drops keys, and a dropped key runs again",
		Mend:      "CONFIG SET maxmemory-policy noeviction, or give the store a Redis of its own",
	}}, nil
}
