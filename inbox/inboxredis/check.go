package inboxredis

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/redisconn"
)

// checkTimeout bounds Processor.Check, whatever the client's own timeouts are.
const checkTimeout = 5 * time.Second

// Check looks for a Redis that may drop the marks of processed messages before their time, and
// asks the next processor, if that has a Check of its own. It returns nil when all is well, else
// the findings, or why it could not look, which it finds out within 6 seconds. Of a cluster it
// asks one node.
func (p *Processor) Check(ctx context.Context) error {
	found := check.Findings{Component: component}
	info, err := redisconn.Within(ctx, checkTimeout, func(ctx context.Context) (string, error) {
		return p.client.Info(ctx, "memory").Result()
	})
	if err != nil {
		found.Join(fmt.Errorf("inboxredis: check: %w", err))
	} else {
		checkClient(p.client, &found)
		checkMemory(info, "the marks of processed messages, and copies take effect again", &found)
	}
	if next, ok := p.next.(interface{ Check(context.Context) error }); ok {
		found.Join(next.Check(ctx))
	}
	return found.Err()
}

// checkClient looks for a client that waits without end.
func checkClient(client redis.UniversalClient, found *check.Findings) {
	if heedsDeadlines, bounded := redisconn.Timeouts(client); !heedsDeadlines && !bounded {
		found.Add("set ContextTimeoutEnabled of the client's options, or a ReadTimeout",
			"the client waits for ever for a connection that has fallen silent, and loses it for its pool")
	}
}

// checkMemory looks for a Redis that may evict what is kept there.
func checkMemory(info, what string, found *check.Findings) {
	policy := infoField(info, "maxmemory_policy")
	if policy == "" || policy == "noeviction" || infoField(info, "maxmemory") == "0" {
		return
	}
	found.Add("CONFIG SET maxmemory-policy noeviction", "maxmemory-policy is %s: Redis may evict %s", policy, what)
}

// infoField returns a field out of the reply to INFO, "" if it is not there.
func infoField(info, name string) string {
	for line := range strings.Lines(info) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

const (
	// minVersion is the first Redis that names entries deleted while they were pending.
	minVersion = 7
	// spareConns are the connections that a consumer needs besides those that wait for messages.
	spareConns = 4
	// deserted is for how long no consumer has asked for messages of a group that is not read.
	deserted = time.Hour
)

// Check looks whether the stream, or each partition, and the group exist, whether there are partitions
// beyond Stream.Partitions or too few connections in the client's pool for them, whether another group
// that is not read keeps a stream from being trimmed, whether Redis may lose or evict messages, and
// whether the times in the Config fit together; then it asks the processor, if that has a Check of its
// own. Of a cluster it asks one node about its settings.
//
// It returns nil when there is nothing to mend. Otherwise the error joins all findings, each with a
// method Mend() string, and what it failed to look at.
func (c *Consumer) Check(ctx context.Context) error {
	found := check.Findings{Component: component}
	c.cfg.checkTimes(&found)
	checkClient(c.groups[0].client, &found)
	found.Join(c.checkRedis(ctx, &found))
	if p, ok := c.processor.(interface{ Check(context.Context) error }); ok {
		found.Join(p.Check(ctx))
	}
	return found.Err()
}

// checkRedis asks the server, until it does not answer.
func (c *Consumer) checkRedis(ctx context.Context, found *check.Findings) error {
	err := c.groups[0].checkServer(ctx, found)
	for _, g := range c.groups {
		err = errors.Join(err, g.checkStream(ctx, found))
		if err != nil && len(c.groups) > 1 { // each more might wait as long
			return err
		}
	}
	return errors.Join(err, c.checkPartitions(ctx, found))
}

// checkPartitions looks whether the client has a connection for each partition, and for a partition after
// the last one: a sender that knows of more writes what is not read.
func (c *Consumer) checkPartitions(ctx context.Context, found *check.Findings) error {
	if len(c.groups) == 1 {
		return nil
	}
	if client, ok := c.groups[0].client.(*redis.Client); ok && client.Options().PoolSize < len(c.groups)+spareConns {
		found.Add(fmt.Sprintf("set PoolSize of the client's options to %d or more", len(c.groups)+spareConns),
			"the client has %d connections, and each of %d partitions may wait on one", client.Options().PoolSize, len(c.groups))
	}
	g, next := c.groups[0], partition.Name(c.cfg.stream, len(c.groups))
	there, err := within(ctx, g, func(ctx context.Context) (int64, error) { return g.client.Exists(ctx, next).Result() })
	if err != nil {
		return fmt.Errorf("inboxredis: check: %w", err)
	}
	if there > 0 {
		found.Add("give senders and consumers one number of partitions, and delete those beyond it when they are read",
			"there is a stream %q, and Stream.Partitions is %d", next, len(c.groups))
	}
	return nil
}

// checkTimes compares what the Config promises.
func (s *settings) checkTimes(found *check.Findings) {
	if window := driver.Horizon(s.Retry); s.remembers && s.retention > 0 && s.retention < window {
		found.Add("lengthen the Retention of the processor, or shorten ConsumerConfig.Retry.MaxAge",
			"a message may be retried for %v, and is remembered for %v: after that it takes effect again", window, s.retention)
	}
	if s.Ordered && !s.ledger {
		found.Add("use a processor with a ledger, such as inboxpgx", "nothing remembers over the end of the process how often an ordered message has failed")
	}
}

// checkServer looks at the server's settings, as far as it tells them.
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
	// A managed server may refuse to tell. Any other failure is a failure to look.
	if _, refused := errors.AsType[redis.Error](err); err != nil && !refused {
		return fmt.Errorf("inboxredis: check: %w", err)
	}
	if config["min-replicas-to-write"] == "0" {
		found.Add("CONFIG SET min-replicas-to-write 1", "Redis takes messages that no replica has: a failover loses them")
	}
	return nil
}

// checkStream looks for the group in both streams, and for groups that are not read.
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

// checkGroup looks whether somebody reads a group that is behind.
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
	if other.Lag >= 0 { // else Redis cannot tell
		behind = fmt.Sprintf("%d messages", other.Lag+other.Pending)
	}
	found.Add(fmt.Sprintf("run its consumers, or XGROUP DESTROY %s %s", g.keys.stream, other.Name),
		"nobody reads the group %q, which is %s behind: the stream is not trimmed", other.Name, behind)
	return nil
}
