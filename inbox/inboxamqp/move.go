package inboxamqp

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
)

const (
	// maxMoves is how many copies are published together.
	maxMoves = 64
	// copyWindow is how many may await their confirm: those of some Moves, and those of messages that
	// pass through.
	copyWindow = 4 * maxMoves
	// shutdownPatience is how long the end of Run waits for confirms.
	shutdownPatience = time.Second
)

// copier publishes copies of messages, on a connection of its own.
type copier struct {
	cfg       *settings
	publisher *amqpconn.Publisher
}

func newCopier(dial amqpconn.Dial, cfg *settings) *copier {
	if cfg.copies != nil {
		dial = cfg.copies
	}
	return &copier{cfg, amqpconn.NewPublisher(amqpconn.PublisherConfig{
		Dial: dial, Timeout: cfg.Timeout, Logger: cfg.Logger,
		Window: copyWindow, ConfirmTimeout: cfg.confirmTimeout, ShutdownTimeout: shutdownPatience,
	})}
}

// outgoing is a copy on its way to a queue, and then what became of it.
type outgoing struct {
	exchange, key string
	copied        amqp.Publishing
	note          string // the queue for the note of a copy that waits; empty: it does not wait
	err           error
}

// place names where the copy goes.
func (o *outgoing) place() string {
	if o.exchange == "" {
		return "queue " + strconv.Quote(o.key)
	}
	return fmt.Sprintf("exchange %q", o.exchange)
}

// outgoing is the copy that a move makes.
func (c *copier) outgoing(d *delivery, m driver.Move) *outgoing {
	switch m.Target {
	case driver.ToDead:
		return &outgoing{key: c.cfg.deadLetterQueue(m.Letter.Class), copied: deadCopy(d.raw, m.Letter)}
	case driver.ToLater:
		return c.toWait(d.session.src.queue, nextCopy(d.raw, d.Message(), m.Next), m.Delay, m.PutOff)
	default:
		return &outgoing{key: d.session.src.queue, copied: nextCopy(d.raw, d.Message(), m.Next)}
	}
}

// publish publishes copies and waits for all outcomes. Those that are too large for the broker lose
// headers, step by step.
func (c *copier) publish(ctx context.Context, outs []*outgoing) {
	defer c.leave(ctx, outs)
	for step := 0; len(outs) > 0; step++ {
		c.publishOnce(ctx, outs)
		if step == len(cuts) {
			return
		}
		var again []*outgoing
		for _, out := range outs {
			if errors.Is(out.err, amqpconn.ErrInvalid) {
				cuts[step](out.copied.Headers)
				again = append(again, out)
			}
		}
		outs = again
	}
}

func (c *copier) publishOnce(ctx context.Context, outs []*outgoing) {
	var under sync.WaitGroup
	under.Add(len(outs))
	for _, out := range outs {
		c.publisher.Publish(ctx, amqpconn.Out{Exchange: out.exchange, Key: out.key, Message: out.copied}, func(err error) {
			out.err = err
			under.Done()
		})
	}
	under.Wait()
}

// result is the outcome as driver.Source says it.
func (o *outgoing) result() error {
	switch {
	case o.err == nil:
		return nil
	case unavailable(o.err):
		return fmt.Errorf("%w: %w", driver.ErrUnavailable, o.err)
	case errors.Is(o.err, amqpconn.ErrInvalid):
		return fmt.Errorf("%s: %w: %w", o.place(), driver.ErrTooLarge, o.err)
	default:
		return fmt.Errorf("%s: %w: %w", o.place(), driver.ErrRefused, o.err)
	}
}

// unavailable reports whether copies cannot be published for now, whatever they are.
func unavailable(err error) bool {
	return errors.Is(err, amqpconn.ErrUnavailable) || errors.Is(err, amqpconn.ErrBlocked)
}
