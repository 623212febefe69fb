package inboxamqp

import (
	"context"
	"errors"
	"log/slog"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/engine"
)

// Consumer hands the messages of one queue, or of its partitions, to a Processor and settles them by its
// answers. Its methods may be called from any goroutine.
type Consumer struct {
	cfg       *settings
	source    *source
	processor inbox.Processor
	engine    runner
}

// runner is the consumer of one queue, or those of all partitions.
type runner interface {
	Run(ctx context.Context) error
	Ready(ctx context.Context) error
	Stats(ctx context.Context) (inbox.Stats, error)
}

// NewConsumer returns a consumer of a queue that connects by dial once Run is called, over two
// connections: one receives, one publishes copies. With Config.Partitions one receives for each partition,
// and a further one counts processes. Every call of dial must open a new
// connection, without the client's own recovery; Dial returns such a function.
//
// A processor with deduplication, such as *inboxpgx.Store, brings its ledger and its retention
// along, and Run prunes it. With a bare inbox.NewMux() a Consumer that never runs serves
// operators: Setup, Check and DeadLetters. Its Replay then takes for granted that processed
// messages are remembered for 8 days.
//
// The error names every violation in cfg. Nothing is asked of a server yet.
func NewConsumer(dial func(ctx context.Context) (*amqp.Connection, error), queue string, processor inbox.Processor, cfg Config) (*Consumer, error) {
	return newConsumer(dial, queue, processor, cfg, tuning{})
}

func newConsumer(dial func(context.Context) (*amqp.Connection, error), queue string, p inbox.Processor, cfg Config, t tuning) (*Consumer, error) {
	s := newSettings(queue, p, cfg, t)
	err := s.validate()
	if dial == nil {
		err = errors.Join(errors.New("inboxamqp: dial is nil"), err)
	}
	c := &Consumer{cfg: s, source: newSource(dial, s), processor: p}
	engineConfig := cfg.ConsumerConfig
	engineConfig.DeadLetterPrefix = s.DeadLetterPrefix
	var wrong error
	c.engine, wrong = newRunner(c.source, p, engine.Config{
		ConsumerConfig: engineConfig, Queue: queue, Package: component, Timeout: cfg.Timeout, MaxBodyBytes: t.maxBodyBytes,
	})
	if err := errors.Join(err, wrong); err != nil {
		return nil, err
	}
	return c, nil
}

// Run consumes until ctx is cancelled or a limit of the Config is reached. Then it takes no
// more messages, gives those back that are not begun, lets the others finish, settles them and
// returns nil, after ShutdownTimeout at the latest. The broker may be down when it starts, or
// go down later: Run goes on trying. Calling it while it runs is an error.
func (c *Consumer) Run(ctx context.Context) error { return c.engine.Run(ctx) }

// Ready returns nil while messages are being received, failed ones have a place to go, and handlers
// return in time. The error says what is not so: why there is no session, which queue has refused a
// failed message within about a minute, or how many handlers overrun their time.
func (c *Consumer) Ready(ctx context.Context) error { return c.engine.Ready(ctx) }

// DeadLetters returns the dead letters in the queues of Config.DeadLetterPrefix and
// Config.Classes, those of other consumers with the same queues included, and with Config.ParkKeys
// those that have stopped their keys. Each call of its methods opens connections of its own, whether Run is at work or not.
//
// While a call works on a queue it holds the messages there that it has looked at, so a second call
// at the same time sees only the others. A replay that ended early, by its context or a lost
// connection, is resumed by calling Replay again. One that takes longer than the broker's
// consumer_timeout, 30 minutes, is ended by it. Replay and Remove write to the log who called
// them, and why.
func (c *Consumer) DeadLetters() inbox.DeadLetters {
	all := driver.JoinDeadLetters(c.source.DeadLetters(), driver.ParkedBy(c.processor, c.cfg.ConsumerConfig))
	return driver.NewDeadLetters(all, c.cfg.retention, c.cfg.Logger.With(slog.String("prefix", c.cfg.DeadLetterPrefix)))
}
