package ratelimitredis

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/redisconn"
	"github.com/holdfast-go/holdfast/ratelimit"
)

// checkTimeout bounds Check, whatever the client's own timeouts are.
const checkTimeout = 5 * time.Second

// Check reports whether the server decides about several limits at once and keeps the counters, and
// whether the client lets go of a connection that falls silent. It returns nil if all is well. Else
// Unwrap() []error of the error gives the findings singly: each has the method Mend() string, unlike
// a failure to look, which takes 5 s at most. Nothing is changed but the server's script cache.
func (l *Limiter) Check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	answer := make(chan error, 1)
	go func() { answer <- l.look(ctx) }() // the client need not mind the deadline
	select {
	case err := <-answer:
		return err
	case <-ctx.Done():
		return fmt.Errorf("ratelimitredis: check: %w", ctx.Err())
	}
}

func (l *Limiter) look(ctx context.Context) error {
	found := check.Findings{Component: "ratelimitredis"}
	if err := l.client.Ping(ctx).Err(); err != nil {
		return fmt.Errorf("ratelimitredis: check: %w", err)
	}
	if heedsDeadlines, bounded := redisconn.Timeouts(l.client); !heedsDeadlines && !bounded {
		found.Add("set ContextTimeoutEnabled of the client's options, or a ReadTimeout",
			"the client waits for ever for a connection that has fallen silent, and loses it for its pool")
	}
	refused := redis.Error(nil)
	switch err := l.rehearse(ctx); {
	case errors.As(err, &refused):
		found.Add(mendOf(refused), "the server refuses to decide: %v", refused)
	case err != nil:
		found.Join(fmt.Errorf("ratelimitredis: check: %w", err))
		return found.Err()
	}
	settings, err := l.client.ConfigGet(ctx, "maxmemory*").Result()
	// A managed server may refuse to tell. Any other failure is a failure to look.
	if err != nil && !errors.As(err, &refused) {
		found.Join(fmt.Errorf("ratelimitredis: check: %w", err))
	}
	if policy := settings["maxmemory-policy"]; settings["maxmemory"] != "0" && policy != "" && !strings.HasPrefix(policy, "noeviction") {
		found.Add("CONFIG SET maxmemory-policy noeviction", "maxmemory-policy %s may drop counters, which admits more than the limits", policy)
	}
	return found.Err()
}

// rehearse asks for a decision about limits that nobody has, and takes nothing.
func (l *Limiter) rehearse(ctx context.Context) error {
	user, global := ratelimit.Limit{Name: "check-user", Max: 1}, ratelimit.Limit{Name: "check-global", Max: 1}
	_, err := l.Peek(ctx, ratelimit.Charge{Limit: user, Key: "check"}, ratelimit.Charge{Limit: global})
	return err
}

func mendOf(refused redis.Error) string {
	if strings.HasPrefix(refused.Error(), "CROSSSLOT") {
		return "set Config.Tag: the server is part of a cluster"
	}
	return "let the user run EVALSHA and EVAL, with TIME, MGET, INCRBY, SET and DEL on keys that begin with Config.Prefix"
}
