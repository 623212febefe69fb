package inboxamqp

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/wire"
	"github.com/holdfast-go/holdfast/outbox/format"
)

const component = "inboxamqp"

const (
	// maxShort is the length of AMQP's short strings, such as queue names.
	maxShort = 255
	// hold is RabbitMQ's default consumer_timeout, after which it takes unsettled messages back.
	hold = 30 * time.Minute
	// confirmRounds is how many times Config.Timeout a confirm may take: unlike the answer to a
	// call it may wait for several disks.
	confirmRounds = 3
)

// Binding routes messages of an exchange to the consumer's queue.
type Binding struct {
	// Exchange is the exchange's name; the default exchange, "", allows no bindings.
	Exchange string
	// Key is the routing key or, on a topic exchange, a pattern such as order.*.
	Key string
}

// Config configures a Consumer. The zero value works.
type Config struct {
	inbox.ConsumerConfig

	// Format is how messages look: a format.Symfony has the classes of a Symfony application by the names
	// of messages, and its stamps. Senders of this module need the same one. Default: this module's own
	// form, with what the zero format.Symfony reads.
	Format format.Format
	// Bindings are made by Setup, and by nothing else. Optional.
	Bindings []Binding
	// Classic has Setup declare classic queues, which are faster and live on one node.
	// Default: quorum queues.
	Classic bool
	// Partitions spreads an ordered consumer over several queues, so that several processes work at
	// once: messages of one key go to the same queue, and each queue serves one process at a time. The
	// queue "orders" is then an exchange, and its partitions are the queues "orders.0" to "orders.3"; see
	// the package's doc. Every process needs the same number; at most 64, and a power of two spreads keys
	// best. It needs Ordered, and excludes Key and ParkKeys. Concurrency, Batch and Prefetch are those of each
	// partition, and the limits those of Run. Default, and 1: one queue.
	Partitions int
	// Timeout bounds the dial, every call to the broker and every note in the processor's ledger;
	// the confirm of a failed message's copy gets three times as long. Default: 5 s.
	Timeout time.Duration
}

// tuning is what only tests set; zero fields change nothing.
type tuning struct {
	maxBodyBytes   int
	confirmTimeout time.Duration
	copies         amqpconn.Dial // of the connection for copies
	leveling       time.Duration
}

// settings are a Config with its defaults, and what else a consumer goes by.
type settings struct {
	Config
	queue          string
	symfony        *wire.Symfony
	confirmTimeout time.Duration
	copies         amqpconn.Dial // nil: as for the others
	leveling       time.Duration // as of package group; 0: its own
	remembers      bool          // the processor remembers what it has processed,
	retention      time.Duration // and for how long;
	ledger         bool          // it keeps a ledger, too
}

func newSettings(queue string, p inbox.Processor, cfg Config, t tuning) *settings {
	cfg.ConsumerConfig = driver.ConsumerDefaults(cfg.ConsumerConfig, queue)
	cfg.Timeout = cmp.Or(cfg.Timeout, 5*time.Second)
	cfg.DeadLetterPrefix = cmp.Or(cfg.DeadLetterPrefix, queue+".")
	cfg.Logger = cfg.Logger.With(slog.String("component", component), slog.String("queue", queue))
	form, _ := wire.NewForm(cfg.Format) // validate has the error
	s := &settings{
		Config: cfg, queue: queue, symfony: form.Symfony, retention: driver.DefaultRetention,
		confirmTimeout: cmp.Or(t.confirmTimeout, confirmRounds*cfg.Timeout), copies: t.copies, leveling: t.leveling,
	}
	if d, ok := p.(driver.Deduplicator); ok {
		s.remembers, s.retention, s.ledger = true, d.Retention(), d.Ledger() != nil
	}
	return s
}

// traits are those of the source.
func (s *settings) traits() driver.Traits {
	return driver.Traits{System: "rabbitmq", MaxWindow: maxWindow, Hold: hold, FewPlaces: true, Exclusive: s.Ordered}
}

// places are the classes with a dead-letter queue of their own.
func (s *settings) places() []string { return driver.Places(s.traits(), s.Classes) }

// deadLetterQueue is the queue of a class, or that of the default class where it has none.
func (s *settings) deadLetterQueue(class string) string {
	if !slices.Contains(s.places(), class) {
		class = driver.ClassDefault
	}
	return driver.DeadLetterQueue(s.DeadLetterPrefix, class)
}

// validate returns every violation of what is RabbitMQ's own.
func (s *settings) validate() error {
	var problems []error
	fail := func(format string, args ...any) {
		problems = append(problems, fmt.Errorf("inboxamqp: "+format, args...))
	}
	if s.queue == "" || strings.HasPrefix(s.queue, sharedPrefix) {
		fail("queue %q: the name is empty, or begins with %s", s.queue, sharedPrefix)
	}
	longest := s.queues
	if s.Partitions > partition.Max { // which is reported below
		longest = sharedQueues
	}
	for _, spec := range longest() {
		if len(spec.name) > maxShort {
			fail("queue %q has more than %d bytes", spec.name, maxShort)
		}
	}
	s.validatePartitions(fail)
	if _, err := wire.NewForm(s.Format); err != nil {
		fail("Config.Format: %w", err)
	}
	for i, b := range s.Bindings {
		if b.Exchange == "" || len(b.Exchange) > maxShort || len(b.Key) > maxShort {
			fail("Config.Bindings[%d] names no exchange, or has a name of more than %d bytes", i, maxShort)
		}
		if s.partitioned() && b.Exchange == s.queue {
			fail("Config.Bindings[%d] names exchange %q, which Config.Partitions puts before the queues", i, b.Exchange)
		}
	}
	return errors.Join(problems...)
}
