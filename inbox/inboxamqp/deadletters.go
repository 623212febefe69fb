package inboxamqp

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
)

// DeadLetters returns the dead letters in the queues of Config.DeadLetterPrefix and
// Config.Classes, those of other consumers with the same queues included. Each call of its methods
// opens connections of its own, whether Run is at work or not.
//
// While a call works on a queue it holds the messages there that it has looked at, so a second call
// at the same time sees only the others. A replay that ended early, by its context or a lost
// connection, is resumed by calling Replay again. One that takes longer than the broker's
// consumer_timeout, 30 minutes, is ended by it. Replay and Remove write to the log who called
// them, and why.
func (c *Consumer) DeadLetters() inbox.DeadLetters {
	return &deadLetters{
		dial: c.dial, timeout: c.cfg.Timeout, logger: c.cfg.Logger,
		prefix: c.cfg.DeadLetterPrefix, classes: driver.AllClasses(c.cfg.Classes), retention: c.cfg.retention,
	}
}

// deadLetters reads and empties dead-letter queues.
type deadLetters struct {
	dial      amqpconn.Dial
	timeout   time.Duration
	logger    *slog.Logger
	prefix    string
	classes   []string
	retention time.Duration // for which consumers remember what they have processed
}

// List implements inbox.DeadLetters.
func (l *deadLetters) List(ctx context.Context, filter inbox.Filter) ([]inbox.DeadLetter, error) {
	var found []inbox.DeadLetter
	_, err := l.each(ctx, filter, func(_ amqp.Delivery, dead inbox.DeadLetter) (fate, error) {
		found = append(found, dead)
		return keep, nil
	})
	return found, wrap("list", err)
}

// Show implements inbox.DeadLetters.
func (l *deadLetters) Show(ctx context.Context, id uuid.UUID) (inbox.DeadLetter, error) {
	found, err := l.List(ctx, inbox.Filter{IDs: []uuid.UUID{id}, Limit: 1})
	if err != nil {
		return inbox.DeadLetter{}, err
	}
	if len(found) == 0 {
		return inbox.DeadLetter{}, inbox.ErrNotFound
	}
	return found[0], nil
}

// Count implements inbox.DeadLetters.
func (l *deadLetters) Count(ctx context.Context, filter inbox.Filter) (n int, err error) {
	_, err = l.each(ctx, filter, func(amqp.Delivery, inbox.DeadLetter) (fate, error) {
		n++
		return keep, nil
	})
	return n, wrap("count", err)
}

// Remove implements inbox.DeadLetters.
func (l *deadLetters) Remove(ctx context.Context, filter inbox.Filter, by, reason string) (int, error) {
	if err := driver.CheckRemoval(by, reason); err != nil {
		return 0, wrap("remove", err)
	}
	n, err := l.each(ctx, filter, func(amqp.Delivery, inbox.DeadLetter) (fate, error) { return remove, nil })
	l.audit(ctx, "dead letters removed", by, reason, filter, err, slog.Int("removed", n))
	return n, wrap("remove", err)
}

// audit leaves a record of a change, also of one that was made in part.
func (l *deadLetters) audit(ctx context.Context, what, by, reason string, filter inbox.Filter, err error, counts ...slog.Attr) {
	attrs := append([]slog.Attr{
		slog.String("by", by), slog.String("reason", reason), slog.String("prefix", l.prefix), slog.Any("filter", filter),
	}, counts...)
	if err != nil {
		attrs = append(attrs, slog.Any("error", err))
	}
	l.logger.LogAttrs(ctx, slog.LevelInfo, what, attrs...)
}

func wrap(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("inboxamqp: %s dead letters: %w", what, err)
}
