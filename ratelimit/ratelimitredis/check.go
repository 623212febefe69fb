package ratelimitredis

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/redisconn"
	"github.com/holdfast-go/holdfast/ratelimit"
)

// checkTimeout bounds Check, whatever the client's own timeouts are.
const checkTimeout = 5 * time.Second

// Check reports whether the server decides about several limits at once and keeps
// the counters, and whether the client lets go of a connection that falls silent.
// Empty means that all is well. The error says that it could not look, which it
// finds out within 5 s. Nothing is changed but the server's script cache.
func (l *Limiter) Check(ctx context.Context) ([]ratelimit.Finding, error) {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	type answer struct {
		found []ratelimit.Finding
		err   error
	}
	answers := make(chan answer, 1)
	go func() { // the client need not mind the deadline
		found, err := l.look(ctx)
		answers <- answer{found, err}
	}()
	select {
	case a := <-answers:
		return a.found, a.err
	case <-ctx.Done():
		return nil, fmt.Errorf("ratelimitredis: check: %w", ctx.Err())
	}
}

func (l *Limiter) look(ctx context.Context) ([]ratelimit.Finding, error) {
	if err := l.client.Ping(ctx).Err(); err != nil {
		return nil, fmt.Errorf("ratelimitredis: check: %w", err)
	}
	var found []ratelimit.Finding
	if heedsDeadlines, bounded := redisconn.Timeouts(l.client); !heedsDeadlines && !bounded {
		found = append(found, ratelimit.Finding{
			Component: "ratelimitredis", Problem: "the client waits for ever for a connection that has fallen silent, and loses it for its pool",
			Mend: "set ContextTimeoutEnabled of the client's options, or a ReadTimeout",
		})
	}
	refused := redis.Error(nil)
	switch err := l.rehearse(ctx); {
	case errors.As(err, &refused):
		found = append(found, ratelimit.Finding{
			Component: "ratelimitredis", Problem: "the server refuses to decide: " + refused.Error(), Mend: mendOf(refused),
		})
	case err != nil:
		return nil, fmt.Errorf("ratelimitredis: check: %w", err)
	}
	settings, err := l.client.ConfigGet(ctx, "maxmemory*").Result()
	if err != nil {
		return found, nil // hosted servers keep CONFIG to themselves
	}
	if policy := settings["maxmemory-policy"]; settings["maxmemory"] != "0" && policy != "" && !strings.HasPrefix(policy, "noeviction") {
		found = append(found, ratelimit.Finding{
			Component: "ratelimitredis",
			Problem:   "maxmemory-policy " + policy + " may drop counters, which admits more than the limits",
			Mend:      "CONFIG SET maxmemory-policy noeviction",
		})
	}
	return found, nil
}

// rehearse asks for a decision about limits that nobody has, and takes nothing.
func (l *Limiter) rehearse(ctx context.Context) error {
	limit := ratelimit.Limit{Max: maxShards}
	user, global := limit, limit
	user.Name, global.Name = "check-user", "check-global"
	_, err := l.Peek(ctx, ratelimit.Charge{Limit: user, Key: "check"}, ratelimit.Charge{Limit: global})
	return err
}

func mendOf(refused redis.Error) string {
	if strings.HasPrefix(refused.Error(), "CROSSSLOT") {
		return "set Config.Tag: the server is part of a cluster"
	}
	return "let the user run EVALSHA and EVAL, with TIME, MGET, INCRBY, SET and DEL on keys that begin with Config.Prefix"
}
