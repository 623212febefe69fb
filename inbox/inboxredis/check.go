package inboxredis

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/redisconn"
)

// checkTimeout bounds Processor.Check, for any timeouts of the client.
const checkTimeout = 5 * time.Second

// Check reports a Redis that may drop the marks of processed messages early, and calls the next processor's Check,
// if it has one. It returns nil if it finds nothing; otherwise the findings, or the error of a check that failed.
// It takes at most 6 seconds. In a cluster it asks one node.
func (p *Processor) Check(ctx context.Context) error {
	found := check.Findings{Component: component}
	info, err := redisconn.Within(ctx, checkTimeout, func(ctx context.Context) (string, error) {
		return p.client.Info(ctx, "memory").Result()
	})
	if err != nil {
		found.Join(fmt.Errorf("inboxredis: check: %w", err))
	} else {
		checkClient(p.client, &found)
		checkMemory(info, "the marks of processed messages, and duplicates take effect", &found)
	}
	if next, ok := p.next.(interface{ Check(context.Context) error }); ok {
		found.Join(next.Check(ctx))
	}
	return found.Err()
}

// checkClient reports a client without a timeout.
func checkClient(client redis.UniversalClient, found *check.Findings) {
	if heedsDeadlines, bounded := redisconn.Timeouts(client); !heedsDeadlines && !bounded {
		found.Add("set ContextTimeoutEnabled of the client's options, or a ReadTimeout",
			"the client waits forever for a silent connection, and its pool loses the connection")
	}
}

// checkMemory reports a Redis that may evict keys.
func checkMemory(info, what string, found *check.Findings) {
	policy := infoField(info, "maxmemory_policy")
	if policy == "" || policy == "noeviction" || infoField(info, "maxmemory") == "0" {
		return
	}
	found.Add("CONFIG SET maxmemory-policy noeviction", "maxmemory-policy is %s: Redis may evict %s", policy, what)
}

// infoField returns a field of the reply to INFO, or "".
func infoField(info, name string) string {
	for line := range strings.Lines(info) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

const (
	// minVersion is the first Redis that reports entries deleted while they were pending.
	minVersion = 7
	// spareConns is the number of connections that a consumer needs besides those that wait for messages.
	spareConns = 4
	// deserted is the idle time of its consumers after which a group counts as not read.
	deserted = time.Hour
)

// Check reports, with the Config and the server:
//
//   - a missing stream, partition or group
//   - a partition beyond Stream.Partitions, or too few connections in the client's pool for the partitions
//   - a group that nobody reads and that prevents trimming
//   - settings of Redis that may lose or evict messages; in a cluster it asks one node
//   - times in the Config that do not fit together
//   - the findings of the processor's own Check, if it has one
//
// It returns nil if it finds nothing. Otherwise the error joins all findings, each with a method Fix() string,
// and the errors of checks that failed.
func (c *Consumer) Check(ctx context.Context) error {
	found := check.Findings{Component: component}
	c.cfg.memory.Check(c.cfg.ConsumerConfig, &found)
	checkClient(c.groups[0].client, &found)
	found.Join(c.checkRedis(ctx, &found))
	if p, ok := c.processor.(interface{ Check(context.Context) error }); ok {
		found.Join(p.Check(ctx))
	}
	return found.Err()
}

// checkRedis checks the server, and stops if it does not answer.
func (c *Consumer) checkRedis(ctx context.Context, found *check.Findings) error {
	err := c.groups[0].checkServer(ctx, found)
	for _, g := range c.groups {
		err = errors.Join(err, g.checkStream(ctx, found))
		if err != nil && len(c.groups) > 1 { // each further check might wait as long
			return err
		}
	}
	return errors.Join(err, c.checkPartitions(ctx, found))
}

// checkPartitions checks that the client has a connection for each partition, and that there is no partition after
// the last one. A sender with a larger number would write messages that nobody reads.
func (c *Consumer) checkPartitions(ctx context.Context, found *check.Findings) error {
	if len(c.groups) == 1 {
		return nil
	}
	if client, ok := c.groups[0].client.(*redis.Client); ok && client.Options().PoolSize < len(c.groups)+spareConns {
		found.Add(fmt.Sprintf("set PoolSize of the client's options to %d or more", len(c.groups)+spareConns),
			"the client has %d connections, but each of %d partitions needs one to wait", client.Options().PoolSize, len(c.groups))
	}
	g, next := c.groups[0], partition.Name(c.cfg.stream, len(c.groups))
	there, err := within(ctx, g, func(ctx context.Context) (int64, error) { return g.client.Exists(ctx, next).Result() })
	if err != nil {
		return fmt.Errorf("inboxredis: check: %w", err)
	}
	if there > 0 {
		found.Add("use the same number of partitions in senders and consumers, and delete further partitions when they are empty",
			"stream %q exists, but Stream.Partitions is %d", next, len(c.groups))
	}
	return nil
}

// checkServer checks the server's settings, as far as it reports them.
func (g *group) checkServer(ctx context.Context, found *check.Findings) error {
	info, err := within(ctx, g, func(ctx context.Context) (string, error) { return g.client.Info(ctx).Result() })
	if err != nil {
		return fmt.Errorf("inboxredis: check: %w", err)
	}
	major, _, _ := strings.Cut(infoField(info, "redis_version"), ".")
	if n, err := strconv.Atoi(major); err == nil && n < minVersion {
		found.Add("upgrade Redis", "version %s is older than %d.0", infoField(info, "redis_version"), minVersion)
	}
	checkMemory(info, "whole streams", found)
	if replicas := infoField(info, "connected_slaves"); replicas == "" || replicas == "0" {
		return nil
	}
	config, err := within(ctx, g, func(ctx context.Context) (map[string]string, error) {
		return g.client.ConfigGet(ctx, "min-replicas-to-write").Result()
	})
	// A managed server may refuse. Any other error means that the check failed.
	if _, refused := errors.AsType[redis.Error](err); err != nil && !refused {
		return fmt.Errorf("inboxredis: check: %w", err)
	}
	if config["min-replicas-to-write"] == "0" {
		found.Add("CONFIG SET min-replicas-to-write 1", "Redis accepts messages without a replica: a failover loses them")
	}
	return nil
}

// checkStream looks for the group in both streams, and for groups that nobody reads.
func (g *group) checkStream(ctx context.Context, found *check.Findings) error {
	for stream, key := range g.keys.read()[:2] {
		groups, err := within(ctx, g, func(ctx context.Context) ([]redis.XInfoGroup, error) {
			return g.client.XInfoGroups(ctx, key).Result()
		})
		if err != nil && !redis.HasErrorPrefix(err, "no such key") {
			return fmt.Errorf("inboxredis: check: stream %q: %w", key, err)
		}
		there := false
		for _, other := range groups {
			if other.Name == g.cfg.ConsumerConfig.Name {
				there = true
				continue
			}
			if stream == 0 && !g.cfg.KeepProcessed {
				if err := g.checkGroup(ctx, other, found); err != nil {
					return err
				}
			}
		}
		if !there {
			found.Add("call Consumer.Setup", "stream %q has no group %q", key, g.cfg.ConsumerConfig.Name)
		}
	}
	return nil
}

// checkGroup checks that somebody reads a group with unprocessed messages.
func (g *group) checkGroup(ctx context.Context, other redis.XInfoGroup, found *check.Findings) error {
	if other.Lag == 0 && other.Pending == 0 {
		return nil
	}
	consumers, err := within(ctx, g, func(ctx context.Context) ([]redis.XInfoConsumer, error) {
		return g.client.XInfoConsumers(ctx, g.keys.stream, other.Name).Result()
	})
	if err != nil {
		return fmt.Errorf("inboxredis: check: group %q: %w", other.Name, err)
	}
	for _, consumer := range consumers {
		if consumer.Idle < deserted {
			return nil
		}
	}
	behind := "messages"
	if other.Lag >= 0 { // otherwise Redis does not know
		behind = fmt.Sprintf("%d messages", other.Lag+other.Pending)
	}
	found.Add(fmt.Sprintf("run its consumers, or XGROUP DESTROY %s %s", g.keys.stream, other.Name),
		"nobody reads the group %q, which is %s behind: the stream is not trimmed", other.Name, behind)
	return nil
}
