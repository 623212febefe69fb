package outboxredis

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/redisconn"
)

// Ready returns nil if Redis answers within Config.Timeout.
func (p *Publisher) Ready(ctx context.Context) error {
	_, err := redisconn.Within(ctx, p.cfg.Timeout, func(ctx context.Context) (string, error) { return p.client.Ping(ctx).Result() })
	if err != nil {
		return fmt.Errorf("outboxredis: %w", err)
	}
	return nil
}

// Window returns how many messages await their answer, and how many may: driver.Windowed.
func (p *Publisher) Window() (used, size int) { return len(p.room), cap(p.room) }

// System implements driver.Identified.
func (*Publisher) System() string { return "redis" }

// Check looks at the streams that Config.Stream, Config.Routes and Config.Partitions name, and at the
// eviction policy, where the server tells it. nil: there is nothing to mend. Else the error joins
// the findings, each with a method Mend() string, and the failures to look.
func (p *Publisher) Check(ctx context.Context) error {
	found := check.Findings{Component: "outboxredis"}
	for _, stream := range p.streams() {
		kind, err := redisconn.Within(ctx, p.cfg.Timeout, func(ctx context.Context) (string, error) { return p.client.Type(ctx, stream).Result() })
		if err != nil {
			found.Join(fmt.Errorf("outboxredis: check: %w", err))
			return found.Err()
		}
		if kind != "stream" && kind != "none" {
			found.Add("configure another stream, or remove the key", "key %q is a %s, not a stream", stream, kind)
		}
	}
	config, err := redisconn.Within(ctx, p.cfg.Timeout, func(ctx context.Context) (map[string]string, error) {
		return p.client.ConfigGet(ctx, "maxmemory-policy").Result()
	})
	// A managed server may refuse to tell. Any other failure is a failure to look.
	if _, refused := errors.AsType[redis.Error](err); err != nil && !refused {
		found.Join(fmt.Errorf("outboxredis: check: %w", err))
	}
	if policy := config["maxmemory-policy"]; strings.HasPrefix(policy, "allkeys-") {
		found.Add("CONFIG SET maxmemory-policy noeviction", "maxmemory-policy %s may evict whole streams", policy)
	}
	return found.Err()
}

// streams are those known before the first message.
func (p *Publisher) streams() []string {
	names := []string{p.cfg.Stream}
	for _, route := range p.cfg.Routes {
		if route.Exchange != "" {
			names = append(names, route.Exchange)
		}
	}
	names = slices.AppendSeq(names, maps.Keys(p.cfg.Partitions))
	slices.Sort(names)
	var all []string
	for _, name := range slices.Compact(names) {
		all = append(all, partition.Names(name, p.cfg.Partitions[name])...)
	}
	return all
}
