package inboxredis

import (
	"context"

	"github.com/redis/go-redis/v9"
)

// Setup creates what is missing of the stream, or of its partitions, and the consumer group. A new group
// begins with the oldest entry that its stream still has. Setup may be called any number of times, by many processes
// at once. Run never does it: where a group is lost, so is the knowledge of what was processed.
func (c *Consumer) Setup(ctx context.Context) error {
	for _, g := range c.groups {
		if err := g.setup(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (g *group) setup(ctx context.Context) error {
	for _, key := range g.keys.read()[:2] {
		if _, err := within(ctx, g, func(ctx context.Context) (string, error) {
			return g.client.XGroupCreateMkStream(ctx, key, g.cfg.Group, "0").Result()
		}); err != nil && !redis.HasErrorPrefix(err, "BUSYGROUP") {
			return g.fault("setup", err)
		}
	}
	return nil
}
