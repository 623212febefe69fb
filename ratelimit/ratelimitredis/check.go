package ratelimitredis

import (
	"context"
	"fmt"
	"strings"

	"github.com/holdfast-go/holdfast/ratelimit"
)

// Check reports whether the server runs the scripts and keeps the counters.
// Empty means that all is well. The error says that it could not look. Nothing
// is changed but the server's script cache.
func (l *Limiter) Check(ctx context.Context) ([]ratelimit.Finding, error) {
	if err := l.client.Ping(ctx).Err(); err != nil {
		return nil, fmt.Errorf("ratelimitredis: check: %w", err)
	}
	var found []ratelimit.Finding
	if err := l.client.ScriptLoad(ctx, l.decideScript.source).Err(); err != nil {
		found = append(found, ratelimit.Finding{
			Component: "ratelimitredis", Problem: "the server does not take scripts: " + err.Error(),
			Mend: "allow EVAL, EVALSHA and SCRIPT LOAD",
		})
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
