package inboxamqp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
)

// DeadLettersConfig configures a DeadLetters. The zero value works.
type DeadLettersConfig struct {
	// Prefix is the Config.DeadLetterPrefix of the consumers.
	Prefix string
	// Classes are the Config.Classes of the consumers.
	Classes []string
	// Retention is how long the consumers remember what they have processed. Default: 8 days.
	Retention time.Duration
	// CallTimeout bounds the dial and every call to the broker. 0 means 10 s.
	CallTimeout time.Duration
	// Logger gets a record of each replay and removal, with who asked for it, and tells of faults
	// while publishing. Nil means slog.Default().
	Logger *slog.Logger
}

// DeadLetters reads and empties the dead-letter queues. While a call works on a queue it
// holds the messages there that it has looked at, so a second call at the same time sees
// only the others. Its methods may be called from any goroutine.
type DeadLetters struct {
	cfg  DeadLettersConfig
	dial amqpconn.Dial
}

// NewDeadLetters returns a DeadLetters. Every call of its methods opens connections by dial
// and closes them.
func NewDeadLetters(dial func(ctx context.Context) (*amqp.Connection, error), cfg DeadLettersConfig) (*DeadLetters, error) {
	err := validateClasses(cfg.Prefix, cfg.Classes)
	if dial == nil {
		err = errors.Join(errors.New("inboxamqp: dial is nil"), err)
	}
	if cfg.CallTimeout < 0 {
		err = errors.Join(err, fmt.Errorf("inboxamqp: DeadLettersConfig.CallTimeout %v is negative", cfg.CallTimeout))
	}
	if err != nil {
		return nil, err
	}
	cfg.Retention = cmp.Or(cfg.Retention, driver.DefaultRetention)
	cfg.CallTimeout = cmp.Or(cfg.CallTimeout, 10*time.Second)
	cfg.Logger = cmp.Or(cfg.Logger, slog.Default())
	return &DeadLetters{cfg: cfg, dial: dial}, nil
}

// List returns the dead letters that the filter selects, bodies included, and leaves them
// where they are. Filter.Limit bounds the memory it takes.
func (l *DeadLetters) List(ctx context.Context, filter inbox.Filter) ([]inbox.DeadLetter, error) {
	var found []inbox.DeadLetter
	_, err := l.each(ctx, filter, func(_ amqp.Delivery, dead inbox.DeadLetter) (fate, error) {
		found = append(found, dead)
		return keep, nil
	})
	return found, l.wrap("list", err)
}

// Show returns the dead letter with the message id, or inbox.ErrNotFound.
func (l *DeadLetters) Show(ctx context.Context, id uuid.UUID) (inbox.DeadLetter, error) {
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
func (l *DeadLetters) Count(ctx context.Context, filter inbox.Filter) (int, error) {
	n, err := l.each(ctx, filter, func(amqp.Delivery, inbox.DeadLetter) (fate, error) { return keep, nil })
	return n, l.wrap("count", err)
}

// Remove deletes the selected dead letters and counts them. The log tells who did so, and why.
func (l *DeadLetters) Remove(ctx context.Context, filter inbox.Filter, by, reason string) (int, error) {
	if err := driver.CheckRemoval(by, reason); err != nil {
		return 0, l.wrap("remove", err)
	}
	n, err := l.each(ctx, filter, func(amqp.Delivery, inbox.DeadLetter) (fate, error) { return remove, nil })
	l.audit(ctx, "dead letters removed", by, reason, filter, err, slog.Int("removed", n))
	return n, l.wrap("remove", err)
}

// audit leaves a record of a change, also of one that was made in part.
func (l *DeadLetters) audit(ctx context.Context, what, by, reason string, filter inbox.Filter, err error, counts ...slog.Attr) {
	attrs := append([]slog.Attr{
		slog.String("component", component), slog.String("by", by), slog.String("reason", reason),
		slog.String("prefix", l.cfg.Prefix), slog.Any("filter", filter),
	}, counts...)
	if err != nil {
		attrs = append(attrs, slog.Any("error", err))
	}
	l.cfg.Logger.LogAttrs(ctx, slog.LevelInfo, what, attrs...)
}

func (l *DeadLetters) wrap(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("inboxamqp: %s dead letters: %w", what, err)
}
