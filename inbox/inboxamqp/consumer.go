package inboxamqp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/engine"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/inbox/group"
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/wire"
	"github.com/holdfast-go/holdfast/outbox/format"
)

// The ledger.
//
// A processor with a ledger (*inboxpgx.Store) also records attempts in a database. It records them from the second
// attempt on, so a message that succeeds at once costs nothing.
//
// The end of an attempt is recorded after its retry is confirmed and before the original is acknowledged. If the
// process crashes between the two, the ledger identifies the redelivered original as a leftover, and the consumer
// drops it. Otherwise it would run again and schedule another retry. If the retry is overdue by 5 minutes, for
// example because its queue was purged, the original runs instead.
//
// The start and end of each run are recorded, too. If the process crashed during a run, the message later runs
// alone, for half a minute each time, so that no other message is suspected. After ConsumerConfig.MaxCrashes such
// runs the next redelivery is not run and becomes a dead letter of class quarantined. That also happens to a good
// message if something else crashes the process during that many of its runs in a row.

// Consumer passes the messages of one queue, or of its partitions, to a Processor and settles them by its results.
// Its methods may be called from any goroutine.
type Consumer struct {
	cfg       *settings
	source    *source
	processor inbox.Processor
	engine    runner
}

// runner is the consumer of one queue, or of all partitions.
type runner interface {
	Run(ctx context.Context) error
	Ready(ctx context.Context) error
	Counts() driver.Counts
	Running() []driver.Running
	Stats(ctx context.Context) (inbox.Stats, error)
}

// NewConsumer returns a consumer of a queue. When Run is called, it opens two connections with dial: one receives,
// one publishes copies. With Queue.Partitions each partition has its own receiving connection, and another
// connection counts processes. Every call of dial must open a new connection, without the client's own recovery;
// Dial returns such a function.
//
// A processor with deduplication, such as *inboxpgx.Store, provides a ledger and a retention, and Run prunes it.
// With a bare inbox.NewMux() a Consumer that never runs can serve operators: Setup, Check and DeadLetters. Its
// Replay then assumes that processed messages are remembered for 8 days.
//
// The error lists every violation in cfg. NewConsumer does not contact a server.
func NewConsumer(dial func(ctx context.Context) (*amqp.Connection, error), queue Queue, processor inbox.Processor, cfg inbox.ConsumerConfig) (*Consumer, error) {
	return newConsumer(dial, queue, processor, cfg, tuning{})
}

func newConsumer(dial func(context.Context) (*amqp.Connection, error), queue Queue, p inbox.Processor, cfg inbox.ConsumerConfig, t tuning) (*Consumer, error) {
	s := newSettings(queue, p, cfg, t)
	err := s.validate()
	if dial == nil {
		err = errors.Join(errors.New("inboxamqp: dial is nil"), err)
	}
	c := &Consumer{cfg: s, source: newSource(dial, s), processor: p}
	cfg.Name, cfg.DeadLetterPrefix = s.ConsumerConfig.Name, s.DeadLetterPrefix
	var wrong error
	c.engine, wrong = newRunner(c.source, p, engine.Config{
		ConsumerConfig: cfg, Queue: s.queue, Package: component, Timeout: queue.Timeout, MaxBodyBytes: t.maxBodyBytes,
	})
	if err := errors.Join(err, wrong); err != nil {
		return nil, err
	}
	return c, nil
}

// Run consumes until ctx is cancelled or a limit of the Config is reached. Then it stops receiving, requeues
// messages that have not started, waits for running handlers, settles their messages and returns nil, after
// ShutdownTimeout at the latest. If the broker is down, at the start or later, Run keeps trying. Calling it while
// it runs is an error.
func (c *Consumer) Run(ctx context.Context) error { return c.engine.Run(ctx) }

// Ready returns nil while messages are received, failed messages can be moved, and handlers return in time. The
// error contains the reason: why there is no session, which queue refused a failed message within about a minute,
// or how many handlers exceed their time.
func (c *Consumer) Ready(ctx context.Context) error { return c.engine.Ready(ctx) }

// Counts returns the numbers of deliveries that this process has settled. It makes no server call.
func (c *Consumer) Counts() driver.Counts { return c.engine.Counts() }

// Running returns the messages in work in this process, the oldest first. It makes no server call.
func (c *Consumer) Running() []driver.Running { return c.engine.Running() }

// DeadLetters returns the dead letters in the queues of ConsumerConfig.DeadLetterPrefix and
// ConsumerConfig.Classes, including those of other consumers with the same queues. With ConsumerConfig.ParkKeys it
// includes dead letters that park their keys. Each call of its methods opens connections of its own; Run need not
// be running.
//
// While a call works on a queue, the messages that it has visited are in flight, so a concurrent call sees only
// the others. If a replay ended early, because its context ended or its connection was lost, call Replay again.
// The broker ends a call that takes longer than its consumer_timeout, 30 minutes. Replay and Remove log the caller
// and the reason.
func (c *Consumer) DeadLetters() inbox.DeadLetters {
	all := driver.JoinDeadLetters(c.source.DeadLetters(), driver.ParkedBy(c.processor, c.cfg.ConsumerConfig))
	return driver.NewDeadLetters(all, c.cfg.memory.Retention, c.cfg.Logger.With(slog.String("prefix", c.cfg.DeadLetterPrefix)))
}

const component = "inboxamqp"

const (
	// maxShort is the length of AMQP's short strings, such as queue names.
	maxShort = 255
	// hold is RabbitMQ's default consumer_timeout, after which it requeues unsettled messages.
	hold = 30 * time.Minute
	// confirmRounds is the timeout of a confirm as a multiple of Queue.Timeout. A confirm, unlike the answer to a
	// call, may wait for several disks.
	confirmRounds = 3
)

// Binding routes messages of an exchange to the consumer's queue.
type Binding struct {
	// Exchange is the exchange's name; the default exchange, "", allows no bindings.
	Exchange string
	// Key is the routing key or, on a topic exchange, a pattern such as order.*.
	Key string
}

// Queue selects the messages of a Consumer. The zero value works.
type Queue struct {
	// Name is the queue's name. Default: the consumer's name.
	Name string
	// Format is the form of messages. A format.Symfony maps message names to the classes of a Symfony application,
	// and has its stamps. Senders that use this module need the same Format. Default: this module's own form, and
	// everything that the zero format.Symfony reads.
	Format format.Format
	// Bindings are made only by Setup. Optional.
	Bindings []Binding
	// Classic makes Setup declare classic queues, which are faster and are stored on one node. Default: quorum
	// queues.
	Classic bool
	// Partitions spreads an ordered consumer over several queues, so that several processes can work at once.
	// Messages of one key go to the same queue, and each queue serves one process at a time. The queue "orders"
	// becomes an exchange, and its partitions are the queues "orders.0" to "orders.3"; see "Partitions" in
	// partitions.go. Every process needs the same number, at most 64; a power of two spreads keys best. It needs
	// Ordered, and excludes Key and ParkKeys. ConsumerConfig.Concurrency, Batch and Prefetch apply to each
	// partition, and limits apply to Run. Default: one queue, the same as 1.
	Partitions int
	// Timeout bounds the dial, every call to the broker and every write to the processor's ledger. The confirm of
	// a failed message's copy may take three times as long. Default: 5 s.
	Timeout time.Duration
}

// tuning contains values that only tests set; zero fields change nothing.
type tuning struct {
	maxBodyBytes   int
	confirmTimeout time.Duration
	copies         amqpconn.Dial // of the connection for copies
	leveling       time.Duration
}

// settings is the configuration of a consumer with defaults applied.
type settings struct {
	inbox.ConsumerConfig
	Queue
	queue          string // its name
	symfony        *wire.Symfony
	confirmTimeout time.Duration
	copies         amqpconn.Dial // nil: the same as for sessions
	leveling       time.Duration // interval of package group; 0: its default
	memory         group.Memory  // of the processor
}

func newSettings(from Queue, p inbox.Processor, cfg inbox.ConsumerConfig, t tuning) *settings {
	var queue string
	cfg.Name, queue = driver.Names(cfg, p, from.Name)
	cfg = driver.ConsumerDefaults(cfg, queue)
	from.Timeout = cmp.Or(from.Timeout, 5*time.Second)
	cfg.DeadLetterPrefix = cmp.Or(cfg.DeadLetterPrefix, queue+".")
	cfg.Logger = cfg.Logger.With(slog.String("component", component), slog.String("queue", queue))
	form, _ := wire.NewForm(from.Format) // validate reports the error
	return &settings{
		ConsumerConfig: cfg, Queue: from, queue: queue, symfony: form.Symfony, memory: group.MemoryOf(p),
		confirmTimeout: cmp.Or(t.confirmTimeout, confirmRounds*from.Timeout), copies: t.copies, leveling: t.leveling,
	}
}

// traits returns the traits of the source.
func (s *settings) traits() driver.Traits {
	return driver.Traits{System: "rabbitmq", MaxWindow: maxWindow, Hold: hold, FewPlaces: true, Exclusive: s.Ordered}
}

// places returns the classes that have a dead-letter queue of their own.
func (s *settings) places() []string { return driver.Places(s.traits(), s.Classes) }

// deadLetterQueue returns the queue of a class, or the queue of the default class if it has none.
func (s *settings) deadLetterQueue(class string) string {
	if !slices.Contains(s.places(), class) {
		class = driver.ClassDefault
	}
	return driver.DeadLetterQueue(s.DeadLetterPrefix, class)
}

// validate returns every violation of RabbitMQ's rules.
func (s *settings) validate() error {
	var problems []error
	fail := func(format string, args ...any) {
		problems = append(problems, fmt.Errorf("inboxamqp: "+format, args...))
	}
	if s.queue == "" || strings.HasPrefix(s.queue, sharedPrefix) {
		fail("queue %q: the name begins with %s, or neither the queue nor the processor has one", s.queue, sharedPrefix)
	}
	longest := s.queues
	if s.Partitions > partition.Max { // group.CheckPartitions reports it
		longest = sharedQueues
	}
	for _, spec := range longest() {
		if len(spec.name) > maxShort {
			fail("queue %q has more than %d bytes", spec.name, maxShort)
		}
	}
	for _, err := range group.CheckPartitions("Queue.Partitions", s.Partitions, s.ConsumerConfig) {
		fail("%w", err)
	}
	if _, err := wire.NewForm(s.Format); err != nil {
		fail("Queue.Format: %w", err)
	}
	for i, b := range s.Bindings {
		if b.Exchange == "" || len(b.Exchange) > maxShort || len(b.Key) > maxShort {
			fail("Queue.Bindings[%d] names no exchange, or has a name of more than %d bytes", i, maxShort)
		}
		if s.partitioned() && b.Exchange == s.queue {
			fail("Queue.Bindings[%d] names exchange %q, which Setup declares for Queue.Partitions", i, b.Exchange)
		}
	}
	return errors.Join(problems...)
}

// Dial returns a function for NewConsumer that opens connections to the broker at url (amqp:// or amqps://), like
// amqp.DialConfig with cfg. The zero cfg works. It is the same function as Dial of package outboxamqp, so
// publishers and consumers can share one.
//
// If cfg.Dial is nil, the context bounds connecting, and its deadline bounds the handshakes. The function may be
// called from any goroutine. Its first call reports a bad url.
func Dial(url string, cfg amqp.Config) func(ctx context.Context) (*amqp.Connection, error) {
	return amqpconn.DialURL(url, cfg)
}

// Backlog implements driver.Measured, for the queue or all its partitions. A missing queue is empty.
func (s *source) Backlog(ctx context.Context) (b driver.Backlog, err error) {
	err = amqpconn.Use(ctx, s.dial, s.cfg.Timeout, func(conn *amqpconn.Conn) error {
		for _, queue := range s.cfg.read() {
			n, err := depth(conn, queue)
			if err != nil {
				return fmt.Errorf("queue %q: %w", queue, err)
			}
			b.Waiting += n
		}
		if b.Retrying, err = depth(conn, s.cfg.noteQueue(false)); err != nil {
			return fmt.Errorf("queue %q: %w", s.cfg.noteQueue(false), err)
		}
		if b.PutOff, err = depth(conn, s.cfg.noteQueue(true)); err != nil {
			return fmt.Errorf("queue %q: %w", s.cfg.noteQueue(true), err)
		}
		return nil
	})
	return b, err
}

// depth returns the number of messages of a queue. A missing queue is empty.
func depth(conn *amqpconn.Conn, name string) (int, error) {
	q, err := conn.Count(name)
	return q.Messages, err
}

// Stats counts the messages of the queue and of its retry and dead-letter queues. Run need not be running.
// Messages that a consumer has prefetched are not counted. It opens connections of its own.
func (c *Consumer) Stats(ctx context.Context) (inbox.Stats, error) { return c.engine.Stats(ctx) }
