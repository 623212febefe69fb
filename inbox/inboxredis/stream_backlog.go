package inboxredis

import (
	"context"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// Backlog implements driver.Measured. What was given back waits like what was never read.
func (s *source) Backlog(ctx context.Context) (b driver.Backlog, err error) {
	g := s.group
	for _, stream := range g.keys.read()[:2] {
		n, err := g.waiting(ctx, stream)
		if err != nil {
			return b, g.fault("count messages", err)
		}
		b.Waiting += n
	}
	for putOff, sum := range map[bool]*int{false: &b.Retrying, true: &b.PutOff} {
		n, err := within(ctx, g, func(ctx context.Context) (int64, error) { return g.client.ZCard(ctx, g.keys.waiting(putOff)).Result() })
		if err != nil {
			return b, g.fault("count waiting messages", err)
		}
		*sum = int(n)
	}
	return b, nil
}

// waiting counts the entries of a stream that no consumer of the group has. A stream or a group that is
// missing has none.
func (g *group) waiting(ctx context.Context, stream string) (int, error) {
	groups, err := within(ctx, g, func(ctx context.Context) ([]redis.XInfoGroup, error) {
		return g.client.XInfoGroups(ctx, stream).Result()
	})
	if redis.HasErrorPrefix(err, "ERR no such key") {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	for _, info := range groups {
		if info.Name != g.cfg.Group {
			continue
		}
		if info.Lag < 0 { // the server cannot tell
			n, err := within(ctx, g, func(ctx context.Context) (int64, error) { return g.client.XLen(ctx, stream).Result() })
			return int(n), err
		}
		given, err := g.givenBack(ctx, stream)
		return int(info.Lag) + given, err
	}
	return 0, nil
}

// givenBack counts what was given back and waits to be claimed.
func (g *group) givenBack(ctx context.Context, stream string) (int, error) {
	consumers, err := within(ctx, g, func(ctx context.Context) ([]redis.XInfoConsumer, error) {
		return g.client.XInfoConsumers(ctx, stream, g.cfg.Group).Result()
	})
	for _, c := range consumers {
		if c.Name == returned {
			return int(c.Pending), err
		}
	}
	return 0, err
}

// Stats counts the messages of the stream or its partitions and of what is behind them, whether Run is
// at work or not.
func (c *Consumer) Stats(ctx context.Context) (inbox.Stats, error) { return c.engine.Stats(ctx) }
