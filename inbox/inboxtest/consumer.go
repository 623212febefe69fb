package inboxtest

import (
	"cmp"
	"context"
	"errors"
	"log/slog"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/engine"
	"github.com/holdfast-go/holdfast/inbox/internal/memqueue"
)

// Consumer hands the messages of one queue of a Broker to a Processor and settles them by its
// answers. It is the consumer of production on queues in memory. Its methods may be called from any
// goroutine.
type Consumer struct {
	engine  *engine.Consumer
	letters inbox.DeadLetters
}

// NewConsumer returns a consumer of a queue, which it declares. Several may share one.
func NewConsumer(b *Broker, queue string, p inbox.Processor, cfg Config) (*Consumer, error) {
	return newConsumer(b, queue, p, cfg, 0)
}

func newConsumer(b *Broker, queue string, p inbox.Processor, cfg Config, maxBody int) (*Consumer, error) {
	cfg = cfg.withDefaults()
	problem := check(b, queue)
	if problem != nil {
		b = NewBroker() // so that the error names all that is wrong
	}
	place := b.queues.Queue(queue, cfg.Classes...)
	source := place.Source(memqueue.Options{Exclusive: cfg.Ordered, Fault: cfg.fault()})
	consumer, err := engine.New(source, p, engine.Config{
		ConsumerConfig: cfg.ConsumerConfig, Queue: queue, Package: "inboxtest", MaxBodyBytes: maxBody,
	})
	if err := errors.Join(problem, err); err != nil {
		return nil, err
	}
	b.bind(place, cfg.Names)
	retention := driver.DefaultRetention
	if d, ok := p.(driver.Deduplicator); ok {
		retention = d.Retention()
	}
	logger := cmp.Or(cfg.Logger, slog.Default()).With(slog.String("component", "inboxtest"), slog.String("queue", queue))
	return &Consumer{consumer, driver.NewDeadLetters(driver.JoinDeadLetters(source.DeadLetters(), driver.ParkedBy(p, cfg.ConsumerConfig)), retention, logger)}, nil
}

// Run delivers until ctx ends, or a limit of the Config is reached. Then it takes no further
// message, gives back what is not begun, lets the rest finish, and returns nil, after ShutdownTimeout
// at the latest. What was not finished is in the queue for the next Run. Calling it while it runs
// is an error.
func (c *Consumer) Run(ctx context.Context) error { return c.engine.Run(ctx) }

// Ready returns nil while Run is at work.
func (c *Consumer) Ready(ctx context.Context) error { return c.engine.Ready(ctx) }

// Stats counts the messages of the queue, whether Run is at work or not.
func (c *Consumer) Stats(ctx context.Context) (inbox.Stats, error) { return c.engine.Stats(ctx) }

// DeadLetters returns the dead letters of the queue.
func (c *Consumer) DeadLetters() inbox.DeadLetters { return c.letters }
