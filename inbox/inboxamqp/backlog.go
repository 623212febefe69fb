package inboxamqp

import (
	"context"
	"fmt"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
)

// Backlog implements driver.Measured, for the queue or all its partitions. A missing queue is empty.
func (s *source) Backlog(ctx context.Context) (b driver.Backlog, err error) {
	err = amqpconn.Use(ctx, s.dial, s.cfg.Timeout, func(conn *amqpconn.Conn) error {
		for _, queue := range s.cfg.read() {
			n, err := depth(conn, queue)
			if err != nil {
				return fmt.Errorf("queue %q: %w", queue, err)
			}
			b.Waiting += n
		}
		if b.Retrying, err = depth(conn, s.cfg.noteQueue(false)); err != nil {
			return fmt.Errorf("queue %q: %w", s.cfg.noteQueue(false), err)
		}
		if b.PutOff, err = depth(conn, s.cfg.noteQueue(true)); err != nil {
			return fmt.Errorf("queue %q: %w", s.cfg.noteQueue(true), err)
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

// Stats counts the messages of the queue and of those behind it, whether Run is at work or not.
// Messages that a consumer has prefetched are not among them. It opens connections of its own.
func (c *Consumer) Stats(ctx context.Context) (inbox.Stats, error) { return c.engine.Stats(ctx) }
