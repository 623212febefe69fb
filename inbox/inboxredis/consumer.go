package inboxredis

import (
	"context"
	"errors"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/engine"
)

// Consumer hands the messages of one stream, or of its partitions, to a Processor and settles them by
// its answers. Its methods may be called from any goroutine.
type Consumer struct {
	cfg       *settings
	groups    []*group // one for each partition
	processor inbox.Processor
	engine    runner
}

// runner is the consumer of one stream, or those of all partitions.
type runner interface {
	Run(ctx context.Context) error
	Ready(ctx context.Context) error
	Stats(ctx context.Context) (inbox.Stats, error)
}

// NewConsumer returns a consumer of a stream. The client stays the caller's, and needs a few
// connections in its pool: one waits for messages.
//
// A processor with deduplication, such as *inboxpgx.Store, brings its ledger and its retention
// along, and Run prunes it. With a bare inbox.NewMux() a Consumer that never runs serves
// operators: Setup, Check and DeadLetters. Its Replay then takes for granted that processed
// messages are remembered for 8 days.
//
// The error names every violation in cfg. Nothing is asked of a server yet.
func NewConsumer(client redis.UniversalClient, stream string, processor inbox.Processor, cfg Config) (*Consumer, error) {
	s, err := newSettings(stream, processor, cfg)
	if client == nil {
		err = errors.Join(errors.New("inboxredis: client is nil"), err)
	}
	c, engineErr := newConsumer(client, s, processor)
	if err := errors.Join(err, engineErr); err != nil {
		return nil, err
	}
	return c, nil
}

func newConsumer(client redis.UniversalClient, s *settings, processor inbox.Processor) (*Consumer, error) {
	groups := newGroups(client, s)
	run, err := newRunner(groups, processor, engine.Config{
		ConsumerConfig: s.ConsumerConfig, Queue: s.stream, Package: component, Timeout: s.Timeout, MaxBodyBytes: s.maxBodyBytes,
	})
	return &Consumer{cfg: s, groups: groups, processor: processor, engine: run}, err
}

// Run consumes until ctx is cancelled or a limit of the Config is reached. Then it takes no
// more messages, gives those back that are not begun, lets the others finish, settles them and
// returns nil, after ShutdownTimeout at the latest. Redis may be down when it starts, or
// go down later: Run goes on trying. Calling it while it runs is an error.
func (c *Consumer) Run(ctx context.Context) error { return c.engine.Run(ctx) }

// Ready returns nil while messages are being received, failed ones have a place to go, and handlers
// return in time. The error says what is not so.
func (c *Consumer) Ready(ctx context.Context) error { return c.engine.Ready(ctx) }

// DeadLetters returns the dead letters of the consumer group, of the classes in Config.Classes and of
// those that every consumer has, whether Run is at work or not. Each call of its methods reads them
// page by page; of two at the same time both may count what one of them has returned or removed.
// Replay and Remove write to the log who called them, and why.
func (c *Consumer) DeadLetters() inbox.DeadLetters {
	parts := []driver.DeadLetters{}
	for _, g := range c.groups {
		parts = append(parts, &letters{g})
	}
	parts = append(parts, driver.ParkedBy(c.processor, c.cfg.ConsumerConfig))
	return driver.NewDeadLetters(driver.JoinDeadLetters(parts...), c.cfg.retention, c.cfg.Logger)
}
