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
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/wire"
	"github.com/holdfast-go/holdfast/outbox/format"
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

// Run consumes until ctx is cancelled or a limit of the Config is reached. Then it takes no
// more messages, gives those back that are not begun, lets the others finish, settles them and
// returns nil, after ShutdownTimeout at the latest. Redis may be down when it starts, or
// go down later: Run goes on trying. Calling it while it runs is an error.
func (c *Consumer) Run(ctx context.Context) error { return c.engine.Run(ctx) }

// Ready returns nil while messages are being received, failed ones have a place to go, and handlers
// return in time. The error says what is not so.
func (c *Consumer) Ready(ctx context.Context) error { return c.engine.Ready(ctx) }

// DeadLetters returns the dead letters of the consumer group, of the classes in ConsumerConfig.Classes and of
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

const component = "inboxredis"

// Stream says which messages a Consumer gets. The zero value works. The consumer group has the consumer's name: each
// group of a stream gets all its messages, and shares them among its processes.
type Stream struct {
	// Name is the stream's name. Default: the consumer's name.
	Name string
	// Format is how messages look: a format.Symfony has the classes of a Symfony application by the names
	// of messages, and its stamps. Senders of this module need the same one. Default: this module's own
	// form, with what the zero format.Symfony reads.
	Format format.Format
	// Partitions is how many streams the stream is split into, at most 64, so that several processes
	// share an Ordered one: those of orders are orders.0, orders.1 and so on. The senders need the same
	// number, outboxredis.Config.Partitions. More than one needs Ordered, and excludes Key
	// and ParkKeys. Concurrency, Batch and Prefetch are those of each partition, and the limits those of Run.
	// Default, and 1: the stream is not split.
	Partitions int
	// KeepProcessed leaves entries in the stream that all its groups have processed, for readers
	// without a group; somebody else must trim the stream then.
	KeepProcessed bool
	// Timeout bounds every call to Redis; a read that waits for messages gets a second more. A client
	// without the option ContextTimeoutEnabled is left behind then, and ends by its own timeouts.
	// Default: 5 s.
	Timeout time.Duration
}

// settings are the configuration of a consumer with its defaults. The engine checks its own part.
type settings struct {
	inbox.ConsumerConfig
	Stream
	stream       string
	symfony      *wire.Symfony
	partitions   []keys // one, that of the stream, where it is not split
	log          *slog.Logger
	maxBodyBytes int           // 0: the engine's own
	leveling     time.Duration // as of package group; 0: its own

	remembers bool          // the processor remembers what it has processed,
	retention time.Duration // and for how long
	ledger    bool          // it notes attempts
}

func newSettings(from Stream, p inbox.Processor, cfg inbox.ConsumerConfig) (*settings, error) {
	var stream string
	cfg.Name, stream = driver.Names(cfg, p, from.Name)
	cfg = driver.ConsumerDefaults(cfg, stream)
	from.Timeout = cmp.Or(from.Timeout, 5*time.Second)
	cfg.Logger = cfg.Logger.With(slog.String("group", cfg.Name))
	s := &settings{
		ConsumerConfig: cfg, Stream: from, stream: stream, retention: driver.DefaultRetention,
		log: cfg.Logger.With(slog.String("component", component)),
	}
	form, misnamed := wire.NewForm(from.Format)
	if misnamed != nil {
		misnamed = fmt.Errorf("inboxredis: Stream.Format: %w", misnamed)
	}
	s.symfony = form.Symfony
	if d, ok := p.(driver.Deduplicator); ok {
		s.remembers, s.retention, s.ledger = true, d.Retention(), d.Ledger() != nil
	}
	problem := s.checkPartitions()
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

// checkPartitions returns what is wrong with Partitions.
func (s *settings) checkPartitions() error {
	var problems []error
	if err := partition.Check(s.Partitions); err != nil {
		problems = append(problems, fmt.Errorf("inboxredis: Stream.Partitions: %w", err))
	}
	if s.Partitions > 1 && !s.Ordered {
		problems = append(problems, errors.New("inboxredis: Stream.Partitions needs ConsumerConfig.Ordered: without it any number of processes share a stream"))
	}
	if s.Partitions > 1 && s.Key != nil {
		problems = append(problems, errors.New("inboxredis: Stream.Partitions excludes ConsumerConfig.Key: the sender's key says which partition a message is in"))
	}
	if s.Partitions > 1 && s.ParkKeys {
		problems = append(problems, errors.New("inboxredis: Stream.Partitions excludes ConsumerConfig.ParkKeys: the parked keys of all partitions are kept together"))
	}
	return errors.Join(problems...)
}

// place is the class whose dead letters those of a class are with: its own or the default.
func (s *settings) place(class string) string {
	if slices.Contains(driver.AllClasses(s.Classes), class) {
		return class
	}
	return driver.ClassDefault
}

// Setup creates what is missing of the stream, or of its partitions, and the consumer group. A new group
// begins with the oldest entry that its stream still has. Setup may be called any number of times, by many processes
// at once. Run never does it: where a group is lost, so is the knowledge of what was processed.
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
