package idempotencyredis

import (
	"context"
	"fmt"

	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/redisconn"
)

// Check looks for settings of the server under which records can vanish before
// their time, and for a client that waits for ever. nil: nothing is wrong. Otherwise
// each joined error is a finding, with the method Mend, or says that the server could
// not be looked at, which it finds out within seconds.
func (s *Store) Check(ctx context.Context) error {
	found := check.Findings{Component: "idempotencyredis"}
	var policy string
	err := s.server.Ask(ctx, false, func(ctx context.Context) (err error) {
		policy, err = within(ctx, s.evictionPolicy)
		return err
	})
	if err != nil {
		return fmt.Errorf("idempotencyredis: check: %w", err)
	}
	if policy != "" {
		found.Add("CONFIG SET maxmemory-policy noeviction, or give the store a Redis of its own",
			"maxmemory-policy is %s: a full server drops keys, and a dropped key runs again", policy)
	}
	if heedsDeadlines, bounded := redisconn.Timeouts(s.client); !heedsDeadlines && !bounded {
		found.Add("set ContextTimeoutEnabled of the client's options, or a ReadTimeout",
			"the client waits for ever for a connection that has fallen silent, and loses it for its pool")
	}
	return found.Err()
}

// evictionPolicy returns the policy by which the server drops keys, "" if it drops none.
func (s *Store) evictionPolicy(ctx context.Context) (string, error) {
	info, err := s.client.InfoMap(ctx, "memory").Result()
	if err != nil {
		return "", err
	}
	memory := info["Memory"]
	policy := memory["maxmemory_policy"]
	if memory["maxmemory"] == "0" || policy == "noeviction" {
		return "", nil
	}
	return policy, nil
}
