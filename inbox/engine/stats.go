package engine

import (
	"context"
	"fmt"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// Stats counts the consumer's messages on the server, whether Run is at work or not. It opens
// connections of its own, and looks at no message. Where a source does not count, numbers are 0.
func (c *Consumer) Stats(ctx context.Context) (inbox.Stats, error) {
	var stats inbox.Stats
	if source, ok := c.source.(driver.Measured); ok {
		backlog, err := source.Backlog(ctx)
		if err != nil {
			return stats, fmt.Errorf("%s: stats: %w", c.cfg.Package, err)
		}
		stats.Waiting, stats.Retrying, stats.PutOff = backlog.Waiting, backlog.Retrying, backlog.PutOff
	}
	dead, held, err := c.signals.depths.byClass(ctx)
	if err != nil {
		return stats, fmt.Errorf("%s: stats: %w", c.cfg.Package, err)
	}
	stats.Dead, stats.Held = dead, held
	return stats, nil
}
