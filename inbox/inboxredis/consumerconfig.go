package inboxredis

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/wire"
	"github.com/holdfast-go/holdfast/outbox/format"
)

const component = "inboxredis"

// Config configures a Consumer. The zero value works.
type Config struct {
	inbox.ConsumerConfig

	// Group is the consumer group. Each group of a stream gets all its messages, and shares them
	// among its consumers. Default: ConsumerConfig.Name, which is the stream's name by default.
	Group string
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

// settings are a Config with its defaults. The engine checks what is its own.
type settings struct {
	Config
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

func newSettings(stream string, p inbox.Processor, cfg Config) (*settings, error) {
	cfg.ConsumerConfig = driver.ConsumerDefaults(cfg.ConsumerConfig, stream)
	cfg.Group = cmp.Or(cfg.Group, cfg.Name)
	cfg.Timeout = cmp.Or(cfg.Timeout, 5*time.Second)
	cfg.Logger = cfg.Logger.With(slog.String("group", cfg.Group))
	s := &settings{
		Config: cfg, stream: stream, retention: driver.DefaultRetention,
		log: cfg.Logger.With(slog.String("component", component)),
	}
	form, misnamed := wire.NewForm(cfg.Format)
	if misnamed != nil {
		misnamed = fmt.Errorf("inboxredis: Config.Format: %w", misnamed)
	}
	s.symfony = form.Symfony
	if d, ok := p.(driver.Deduplicator); ok {
		s.remembers, s.retention, s.ledger = true, d.Retention(), d.Ledger() != nil
	}
	problem := s.checkPartitions()
	streams := []string{stream}
	if problem == nil {
		streams = partition.Names(stream, cfg.Partitions)
	}
	problem = errors.Join(problem, misnamed)
	for _, name := range streams {
		keys, err := newKeys(name, cfg.Group)
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
		problems = append(problems, fmt.Errorf("inboxredis: Config.Partitions: %w", err))
	}
	if s.Partitions > 1 && !s.Ordered {
		problems = append(problems, errors.New("inboxredis: Config.Partitions needs ConsumerConfig.Ordered: without it any number of processes share a stream"))
	}
	if s.Partitions > 1 && s.Key != nil {
		problems = append(problems, errors.New("inboxredis: Config.Partitions excludes ConsumerConfig.Key: the sender's key says which partition a message is in"))
	}
	if s.Partitions > 1 && s.ParkKeys {
		problems = append(problems, errors.New("inboxredis: Config.Partitions excludes ConsumerConfig.ParkKeys: the parked keys of all partitions are kept together"))
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
