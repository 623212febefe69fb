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
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/wire"
	"github.com/holdfast-go/holdfast/outbox/format"
)

// The ledger.
//
// With a processor that keeps a ledger (*inboxpgx.Store) the attempts are noted in a database as
// well, from the second on, so that a message that goes well at once pays nothing. An attempt is
// noted as over when its retry is confirmed and before the original is acknowledged: when the
// process dies in between, the original is known as a leftover and dropped, where it would run
// again and schedule a retry of its own. When the retry is overdue by 5 minutes, as after a purge of its
// queue, the original runs in its place. The beginning and the end of each run are noted, too.
// When a run began and the process did not survive it, the message runs alone from then on, for
// half a minute each time, so that no other message is blamed, and after ConsumerConfig.MaxCrashes such
// runs its next redelivery goes unrun to the class quarantined. That holds for a good message,
// too, if something else ends the process in so many of its runs, one after the other.

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
// connections: one receives, one publishes copies. With Queue.Partitions one receives for each partition,
// and a further one counts processes. Every call of dial must open a new
// connection, without the client's own recovery; Dial returns such a function.
//
// A processor with deduplication, such as *inboxpgx.Store, brings its ledger and its retention
// along, and Run prunes it. With a bare inbox.NewMux() a Consumer that never runs serves
// operators: Setup, Check and DeadLetters. Its Replay then takes for granted that processed
// messages are remembered for 8 days.
//
// The error names every violation in cfg. Nothing is asked of a server yet.
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

// Run consumes until ctx is cancelled or a limit of the Config is reached. Then it takes no
// more messages, gives those back that are not begun, lets the others finish, settles them and
// returns nil, after ShutdownTimeout at the latest. The broker may be down when it starts, or
// go down later: Run goes on trying. Calling it while it runs is an error.
func (c *Consumer) Run(ctx context.Context) error { return c.engine.Run(ctx) }

// Ready returns nil while messages are being received, failed ones have a place to go, and handlers
// return in time. The error says what is not so: why there is no session, which queue has refused a
// failed message within about a minute, or how many handlers overrun their time.
func (c *Consumer) Ready(ctx context.Context) error { return c.engine.Ready(ctx) }

// DeadLetters returns the dead letters in the queues of ConsumerConfig.DeadLetterPrefix and
// ConsumerConfig.Classes, those of other consumers with the same queues included, and with ConsumerConfig.ParkKeys
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

const component = "inboxamqp"

const (
	// maxShort is the length of AMQP's short strings, such as queue names.
	maxShort = 255
	// hold is RabbitMQ's default consumer_timeout, after which it takes unsettled messages back.
	hold = 30 * time.Minute
	// confirmRounds is how many times Queue.Timeout a confirm may take: unlike the answer to a
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

// Queue says which messages a Consumer gets. The zero value works.
type Queue struct {
	// Name is the queue's name. Default: the consumer's name.
	Name string
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
	// best. It needs Ordered, and excludes Key and ParkKeys. ConsumerConfig.Concurrency, Batch and Prefetch are those of
	// each partition, and the limits those of Run. Default, and 1: one queue.
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

// settings are the configuration of a consumer with its defaults.
type settings struct {
	inbox.ConsumerConfig
	Queue
	queue          string // its name
	symfony        *wire.Symfony
	confirmTimeout time.Duration
	copies         amqpconn.Dial // nil: as for the others
	leveling       time.Duration // as of package group; 0: its own
	remembers      bool          // the processor remembers what it has processed,
	retention      time.Duration // and for how long;
	ledger         bool          // it keeps a ledger, too
}

func newSettings(from Queue, p inbox.Processor, cfg inbox.ConsumerConfig, t tuning) *settings {
	var queue string
	cfg.Name, queue = driver.Names(cfg, p, from.Name)
	cfg = driver.ConsumerDefaults(cfg, queue)
	from.Timeout = cmp.Or(from.Timeout, 5*time.Second)
	cfg.DeadLetterPrefix = cmp.Or(cfg.DeadLetterPrefix, queue+".")
	cfg.Logger = cfg.Logger.With(slog.String("component", component), slog.String("queue", queue))
	form, _ := wire.NewForm(from.Format) // validate has the error
	s := &settings{
		ConsumerConfig: cfg, Queue: from, queue: queue, symfony: form.Symfony, retention: driver.DefaultRetention,
		confirmTimeout: cmp.Or(t.confirmTimeout, confirmRounds*from.Timeout), copies: t.copies, leveling: t.leveling,
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
		fail("queue %q: the name begins with %s, or neither the queue nor the processor has one", s.queue, sharedPrefix)
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
		fail("Queue.Format: %w", err)
	}
	for i, b := range s.Bindings {
		if b.Exchange == "" || len(b.Exchange) > maxShort || len(b.Key) > maxShort {
			fail("Queue.Bindings[%d] names no exchange, or has a name of more than %d bytes", i, maxShort)
		}
		if s.partitioned() && b.Exchange == s.queue {
			fail("Queue.Bindings[%d] names exchange %q, which Queue.Partitions puts before the queues", i, b.Exchange)
		}
	}
	return errors.Join(problems...)
}

// Dial returns a function for NewConsumer that opens connections to the broker at
// url (amqp:// or amqps://), as amqp.DialConfig does with cfg; the zero cfg will do. It is the
// Dial of package outboxamqp: one function serves publishers and consumers.
//
// Where cfg.Dial is nil, the context bounds connecting, and its deadline the handshakes. The
// function may be called from any goroutine. A bad url is reported by its first call.
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

// depth is how many messages a queue holds. A missing queue is empty.
func depth(conn *amqpconn.Conn, name string) (int, error) {
	q, err := conn.Count(name)
	return q.Messages, err
}

// Stats counts the messages of the queue and of those behind it, whether Run is at work or not.
// Messages that a consumer has prefetched are not among them. It opens connections of its own.
func (c *Consumer) Stats(ctx context.Context) (inbox.Stats, error) { return c.engine.Stats(ctx) }
