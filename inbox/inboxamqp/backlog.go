package inboxamqp

import (
	"context"
	"fmt"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/partition"
)

// Backlog implements driver.Measured, for the queue or all its partitions. A missing queue is empty.
func (s *source) Backlog(ctx context.Context) (b driver.Backlog, err error) {
	own := []string{s.cfg.queue}
	if s.cfg.partitioned() {
		own = partition.Names(s.cfg.queue, s.cfg.Partitions)
	}
	err = amqpconn.Use(ctx, s.dial, s.cfg.Timeout, func(conn *amqpconn.Conn) error {
		for _, queue := range own {
			n, err := depth(conn, queue)
			if err != nil {
				return fmt.Errorf("queue %q: %w", queue, err)
			}
			b.Waiting += n
		}
		for _, delay := range driver.Steps(s.cfg.Retry) {
			n, err := depth(conn, retryQueue(s.cfg.queue, delay))
			if err != nil {
				return fmt.Errorf("queue %q: %w", retryQueue(s.cfg.queue, delay), err)
			}
			b.Retrying += n
		}
		return nil
	})
	return b, err
}

// depth is how many messages a queue holds. A missing queue is empty.
func depth(conn *amqpconn.Conn, name string) (int, error) {
	q, err := conn.Count(name)
	return q.Messages, err
}

// Backlog implements driver.Measured.
func (p *partitions) Backlog(ctx context.Context) (driver.Backlog, error) { return p.base.Backlog(ctx) }

// Stats counts the messages of the queue and of those behind it, whether Run is at work or not.
// Messages that a consumer has prefetched are not among them. It opens connections of its own.
func (c *Consumer) Stats(ctx context.Context) (inbox.Stats, error) { return c.engine.Stats(ctx) }
