package inboxamqp

import (
	"context"
	"log/slog"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/wire"
)

// letters is a driver.DeadLetters: one queue for each class.
type letters struct {
	dial    amqpconn.Dial
	timeout time.Duration
	logger  *slog.Logger
	prefix  string
	classes []string
	// returned is a letter of a queue on its way back.
	returned func(raw amqp.Delivery, queue string) amqpconn.Out
	symfony  *wire.Symfony
}

func newLetters(dial amqpconn.Dial, cfg *settings) *letters {
	return &letters{dial: dial, timeout: cfg.Timeout, logger: cfg.Logger, prefix: cfg.DeadLetterPrefix, classes: cfg.places(), returned: cfg.returned, symfony: cfg.symfony}
}

// Depths implements driver.DeadLetters.
func (l *letters) Depths(ctx context.Context) ([]driver.Depth, error) {
	depths := make([]driver.Depth, len(l.classes))
	err := amqpconn.Use(ctx, l.dial, l.timeout, func(conn *amqpconn.Conn) error {
		for i, class := range l.classes {
			q, err := conn.Count(l.queue(class))
			if err != nil {
				return err
			}
			depths[i] = driver.Depth{Class: class, Messages: q.Messages, Held: q.Consumers > 0}
		}
		return nil
	})
	return depths, err
}

func (l *letters) queue(class string) string { return driver.DeadLetterQueue(l.prefix, class) }
