package inboxredis

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/engine"
	partitions "github.com/holdfast-go/holdfast/internal/inbox/group"
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/wire"
	"github.com/holdfast-go/holdfast/outbox/format"
)

// Consumer passes the messages of one stream, or of its partitions, to a Processor and settles them by its
// results. Its methods may be called from any goroutine.
type Consumer struct {
	cfg       *settings
	groups    []*group // one for each partition
	processor inbox.Processor
	engine    runner
}

// runner is the consumer of one stream, or of all partitions.
type runner interface {
	Run(ctx context.Context) error
	Ready(ctx context.Context) error
	Counts() driver.Counts
	Running() []driver.Running
	Stats(ctx context.Context) (inbox.Stats, error)
}

// NewConsumer returns a consumer of a stream. It does not close the client. The client's pool needs a few
// connections, because one waits for messages.
//
// A processor with deduplication, such as *inboxpgx.Store, provides a ledger and a retention, and Run prunes it.
// With a bare inbox.NewMux() a Consumer that never runs can serve operators: Setup, Check and DeadLetters. Its
// Replay then assumes that processed messages are remembered for 8 days.
//
// The error lists every violation in cfg. NewConsumer does not contact a server.
func NewConsumer(client redis.UniversalClient, stream Stream, processor inbox.Processor, cfg inbox.ConsumerConfig) (*Consumer, error) {
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

// Run consumes until ctx is cancelled or a limit of the Config is reached. Then it stops receiving, requeues
// messages that have not started, waits for running handlers, settles their messages and returns nil, after
// ShutdownTimeout at the latest. If Redis is down, at the start or later, Run keeps trying. Calling it while it
// runs is an error.
func (c *Consumer) Run(ctx context.Context) error { return c.engine.Run(ctx) }

// Ready returns nil while messages are received, failed messages can be moved, and handlers return in time.
// Otherwise the error contains the reason.
func (c *Consumer) Ready(ctx context.Context) error { return c.engine.Ready(ctx) }

// Counts returns the numbers of deliveries that this process has settled. It makes no server call.
func (c *Consumer) Counts() driver.Counts { return c.engine.Counts() }

// Running returns the messages in work in this process, the oldest first. It makes no server call.
func (c *Consumer) Running() []driver.Running { return c.engine.Running() }

// DeadLetters returns the dead letters of the consumer group, of the classes in ConsumerConfig.Classes and of the
// classes that every consumer has. Run need not be running. Each call of its methods reads them page by page. Two
// concurrent calls may both count a dead letter that one of them returned or removed. Replay and Remove log the
// caller and the reason.
func (c *Consumer) DeadLetters() inbox.DeadLetters {
	parts := []driver.DeadLetters{}
	for _, g := range c.groups {
		parts = append(parts, &letters{g})
	}
	parts = append(parts, driver.ParkedBy(c.processor, c.cfg.ConsumerConfig))
	return driver.NewDeadLetters(driver.JoinDeadLetters(parts...), c.cfg.memory.Retention, c.cfg.Logger)
}

const component = "inboxredis"

// Stream selects the messages of a Consumer. The zero value works. The consumer group has the consumer's name.
// Each group of a stream gets all its messages, and shares them among its processes.
type Stream struct {
	// Name is the stream's name. Default: the consumer's name.
	Name string
	// Format is the form of messages. A format.Symfony maps message names to the classes of a Symfony application,
	// and has its stamps. Senders that use this module need the same Format. Default: this module's own form, and
	// everything that the zero format.Symfony reads.
	Format format.Format
	// Partitions is the number of streams that the stream is split into, at most 64, so that several processes
	// share an Ordered stream. The partitions of orders are orders.0, orders.1 and so on. The senders need the
	// same number, outboxredis.Config.Partitions. More than one needs Ordered, and excludes Key and ParkKeys.
	// Concurrency, Batch and Prefetch apply to each partition, and limits apply to Run. Default: the stream is not
	// split, the same as 1.
	Partitions int
	// KeepProcessed keeps entries in the stream that all its groups have processed, for readers without a group.
	// Another program must then trim the stream.
	KeepProcessed bool
	// Timeout bounds every call to Redis; a read that waits for messages gets a second more. After that, a call of
	// a client without the option ContextTimeoutEnabled is abandoned, and ends by the client's own timeouts.
	// Default: 5 s.
	Timeout time.Duration
}

// settings is the configuration of a consumer with defaults applied. The engine checks its own part.
type settings struct {
	inbox.ConsumerConfig
	Stream
	stream       string
	symfony      *wire.Symfony
	partitions   []keys // only the stream itself if it is not split
	log          *slog.Logger
	maxBodyBytes int               // 0: the engine's default
	leveling     time.Duration     // interval of package group; 0: its default
	memory       partitions.Memory // of the processor
}

func newSettings(from Stream, p inbox.Processor, cfg inbox.ConsumerConfig) (*settings, error) {
	var stream string
	cfg.Name, stream = driver.Names(cfg, p, from.Name)
	cfg = driver.ConsumerDefaults(cfg, stream)
	from.Timeout = cmp.Or(from.Timeout, 5*time.Second)
	cfg.Logger = cfg.Logger.With(slog.String("group", cfg.Name))
	s := &settings{
		ConsumerConfig: cfg, Stream: from, stream: stream, memory: partitions.MemoryOf(p),
		log: cfg.Logger.With(slog.String("component", component)),
	}
	form, misnamed := wire.NewForm(from.Format)
	if misnamed != nil {
		misnamed = fmt.Errorf("inboxredis: Stream.Format: %w", misnamed)
	}
	s.symfony = form.Symfony
	var problem error
	for _, err := range partitions.CheckPartitions("Stream.Partitions", from.Partitions, cfg) {
		problem = errors.Join(problem, fmt.Errorf("inboxredis: %w", err))
	}
	streams := []string{stream}
	if problem == nil {
		streams = partition.Names(stream, from.Partitions)
	}
	problem = errors.Join(problem, misnamed)
	for _, name := range streams {
		keys, err := newKeys(name, cfg.Name)
		s.partitions = append(s.partitions, keys)
		if err != nil {
			return s, errors.Join(problem, fmt.Errorf("inboxredis: %w", err))
		}
	}
	return s, problem
}

// place returns the class whose stream contains the dead letters of a class: the class itself or the default.
func (s *settings) place(class string) string {
	if slices.Contains(driver.AllClasses(s.Classes), class) {
		return class
	}
	return driver.ClassDefault
}

// Setup creates the stream, or its partitions, and the consumer group, if they do not exist. A new group starts
// with the oldest entry in its stream. Setup may be called repeatedly, by several processes at once. Run never
// creates a group, because a lost group means that the record of processed messages is lost too.
func (c *Consumer) Setup(ctx context.Context) error {
	for _, g := range c.groups {
		if err := g.setup(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (g *group) setup(ctx context.Context) error {
	for _, key := range g.keys.read()[:2] {
		if _, err := within(ctx, g, func(ctx context.Context) (string, error) {
			return g.client.XGroupCreateMkStream(ctx, key, g.cfg.ConsumerConfig.Name, "0").Result()
		}); err != nil && !redis.HasErrorPrefix(err, "BUSYGROUP") {
			return g.fault("setup", err)
		}
	}
	return nil
}
