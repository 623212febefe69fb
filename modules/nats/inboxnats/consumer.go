package inboxnats

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/inbox/group"
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/wire"
	"github.com/holdfast-go/holdfast/outbox/format"
)

const component = "inboxnats"

// maxMoves is the largest number of unacknowledged copies: all partitions move 64 at once, and abandoned ones count until
// their timeout.
const maxMoves = 4 * 64 * 64

// keeperTime is how long the server keeps messages for an interrupted Setup. The next Setup ends it.
const keeperTime = 7 * 24 * time.Hour

// openEvery is the interval in which Setup checks whether another process has opened the stream.
const openEvery = 50 * time.Millisecond

// Stream selects the messages of a Consumer. The zero value works. The durable consumer has the consumer's name: each
// durable consumer of a stream gets all its messages, and its processes share them.
type Stream struct {
	// Name is the stream's name: letters, digits, "-" and "_". Default: the consumer's name.
	Name string
	// Subject selects messages of the stream, with wildcards. Default: <name>.>, for senders whose
	// outboxnats.Config.Topic is <name>.
	Subject string
	// Format is the form of messages. format.Symfony maps the names of messages to the classes of a Symfony
	// application and reads its stamps. Default: this module's own form, which includes the headers that the zero
	// format.Symfony reads.
	Format format.Format
	// Partitions is the number of parts of Subject, at most 64, so that several processes share an Ordered stream.
	// The parts of shop.> are shop.0.>, shop.1.> and so on. The senders need the same number,
	// outboxnats.Config.Partitions. More than one needs Ordered, and excludes Key and ParkKeys. Concurrency, Batch
	// and Prefetch apply to each partition, and the limits to Run. Default: the subject is not split, the same as 1.
	Partitions int
	// Replicas is the number of servers in a cluster that keep the streams created by Setup. Default: 1.
	Replicas int
	// Timeout bounds every call to the server. Default: 5 s.
	Timeout time.Duration
}

// Consumer passes the messages of one stream, or of its partitions, to a Processor and settles them by the returned
// errors. It is safe for concurrent use.
type Consumer struct {
	cfg       *settings
	parts     []*source // one per partition
	processor inbox.Processor
	engine    runner
}

// runner consumes one stream, or all partitions.
type runner interface {
	Run(ctx context.Context) error
	Ready(ctx context.Context) error
	Counts() driver.Counts
	Running() []driver.Running
	Stats(ctx context.Context) (inbox.Stats, error)
}

// NewConsumer returns a consumer of a stream. It does not close the connection, which must reconnect forever
// (nats.MaxReconnects(-1)).
//
// A processor with deduplication, such as *inboxpgx.Store, also provides its ledger and its retention, and Run prunes
// it. With a bare inbox.NewMux() a Consumer that never runs serves operators: Setup, Check and DeadLetters.
//
// The error lists every wrong field of cfg. NewConsumer does not contact a server.
func NewConsumer(conn *nats.Conn, stream Stream, processor inbox.Processor, cfg inbox.ConsumerConfig) (*Consumer, error) {
	s, err := newSettings(conn, stream, processor, cfg)
	if err != nil {
		return nil, err
	}
	return newConsumer(s, processor)
}

func newConsumer(s *settings, processor inbox.Processor) (*Consumer, error) {
	c := &Consumer{cfg: s, processor: processor}
	for _, p := range s.places {
		c.parts = append(c.parts, newSource(s, p))
	}
	var err error
	c.engine, err = newRunner(s, c.parts, processor)
	return c, err
}

// Run consumes until ctx is cancelled or a limit of the Config is reached. Then it stops receiving, requeues messages
// that have not started, waits for running handlers, settles their messages and returns nil, within ShutdownTimeout.
// The server may be down at the start and at any time later. A second call while Run is running returns an error.
func (c *Consumer) Run(ctx context.Context) error { return c.engine.Run(ctx) }

// Ready returns nil while messages are received, failed messages can be moved, and handlers return in time. Otherwise
// the error names the reason.
func (c *Consumer) Ready(ctx context.Context) error { return c.engine.Ready(ctx) }

// Counts returns the numbers of deliveries that this process has settled. It makes no server call.
func (c *Consumer) Counts() driver.Counts { return c.engine.Counts() }

// Running returns the messages in work in this process, the oldest first. It makes no server call.
func (c *Consumer) Running() []driver.Running { return c.engine.Running() }

// Stats counts the messages of the stream or its partitions, also without Run. Messages that other processes are
// working on count as waiting, because the server does not distinguish them from requeued ones.
func (c *Consumer) Stats(ctx context.Context) (inbox.Stats, error) { return c.engine.Stats(ctx) }

// DeadLetters returns the dead letters of the consumer, of the classes in ConsumerConfig.Classes and the built-in
// classes, also without Run. Replay and Remove log who called them, and why.
func (c *Consumer) DeadLetters() inbox.DeadLetters {
	var parts []driver.DeadLetters
	for _, s := range c.parts {
		parts = append(parts, s.DeadLetters())
	}
	parts = append(parts, driver.ParkedBy(c.processor, c.cfg.ConsumerConfig))
	return driver.NewDeadLetters(driver.JoinDeadLetters(parts...), c.cfg.memory.Retention, c.cfg.Logger)
}

// settings is the configuration of a consumer with its defaults. The engine checks its own part.
type settings struct {
	inbox.ConsumerConfig
	Stream

	conn         *nats.Conn
	js           jetstream.JetStream
	places       []places // one per partition
	symfony      *wire.Symfony
	log          *slog.Logger
	maxBodyBytes int           // 0: the engine's own
	leveling     time.Duration // passed to package group; 0: its default
	memory       group.Memory  // of the processor
}

// validName matches names that need no escaping in subjects and are unambiguous in names of streams.
var validName = regexp.MustCompile(`^[A-Za-z0-9_-]{1,200}$`)

func newSettings(conn *nats.Conn, from Stream, p inbox.Processor, cfg inbox.ConsumerConfig) (*settings, error) {
	cfg.Name, from.Name = driver.Names(cfg, p, from.Name)
	cfg = driver.ConsumerDefaults(cfg, from.Name)
	cfg.Logger = cfg.Logger.With(slog.String("consumer", cfg.Name))
	from.Subject = cmp.Or(from.Subject, from.Name+".>")
	from.Timeout = cmp.Or(from.Timeout, 5*time.Second)
	from.Replicas = cmp.Or(from.Replicas, 1)
	s := &settings{
		ConsumerConfig: cfg, Stream: from, conn: conn, memory: group.MemoryOf(p),
		log: cfg.Logger.With(slog.String("component", component)),
	}
	var problems []error
	fail := func(format string, args ...any) {
		problems = append(problems, fmt.Errorf("inboxnats: "+format, args...))
	}
	if conn == nil {
		fail("conn is nil")
	}
	if !validName.MatchString(from.Name) {
		fail("Stream.Name %q: 1 to 200 letters, digits, hyphens and underscores are allowed", from.Name)
	}
	if !validName.MatchString(cfg.Name) {
		fail("ConsumerConfig.Name %q: 1 to 200 letters, digits, hyphens and underscores are allowed", cfg.Name)
	}
	if from.Replicas < 0 || from.Timeout < 0 {
		fail("Stream.Replicas is %d and Stream.Timeout %v, want more than 0", from.Replicas, from.Timeout)
	}
	form, err := wire.NewForm(from.Format)
	if err != nil {
		fail("Stream.Format: %w", err)
	}
	s.symfony = form.Symfony
	for _, err := range group.CheckPartitions("Stream.Partitions", from.Partitions, cfg) {
		fail("%w", err)
	}
	if from.Partitions > 1 && !strings.HasSuffix(from.Subject, ".>") {
		fail("Stream.Subject %q must end with .> to be split", from.Subject)
	}
	if err := errors.Join(problems...); err != nil {
		return s, err
	}
	if s.js, err = jetstream.New(conn, jetstream.WithPublishAsyncTimeout(from.Timeout), jetstream.WithPublishAsyncMaxPending(maxMoves)); err != nil {
		return s, fmt.Errorf("inboxnats: %w", err)
	}
	for i := range max(from.Partitions, 1) {
		s.places = append(s.places, newPlaces(from, cfg, i))
	}
	return s, nil
}

// places are the names on the server of a consumer or of one of its partitions.
type places struct {
	queue    string // its name in messages and metrics
	stream   string
	filter   string // selects its messages
	consumer string // the durable consumer of the stream and of the retries
	// Streams of the consumer, for all its partitions.
	retries, dead, owners string
	// Subjects in these streams. The subjects of dead letters end with the name of a class's queue.
	later, putOff, letters, owner, members string
}

func newPlaces(from Stream, cfg inbox.ConsumerConfig, i int) places {
	base, part := "holdfast."+from.Name+"."+cfg.Name, "all"
	p := places{queue: from.Name, stream: from.Name, filter: from.Subject, consumer: cfg.Name}
	if from.Partitions > 1 {
		part = strconv.Itoa(i)
		p.queue = partition.Name(from.Name, i)
		p.filter = strings.TrimSuffix(from.Subject, ">") + part + ".>"
		p.consumer += "=" + part
	}
	own := from.Name + "=" + cfg.Name + "="
	p.retries, p.dead, p.owners = own+"retries", own+"dead", own+"owners"
	p.later, p.putOff = base+".retry."+part+".later", base+".retry."+part+".putoff"
	p.letters = base + ".dead." + part + "."
	p.owner, p.members = base+".own.owner."+part, base+".own.member."
	return p
}

// letter is the subject of the dead letters of a class, or of class default if the class has none.
func (s *settings) letter(p places, class string) string {
	if !slices.Contains(driver.AllClasses(s.Classes), class) {
		class = driver.ClassDefault
	}
	return p.letters + strings.ReplaceAll(driver.DeadLetterQueue(s.DeadLetterPrefix, class), ".", "_")
}

// Setup creates everything missing: the stream, which keeps messages until all its durable consumers have processed
// them, the durable consumers, and the consumer's own streams for retries, dead letters and, if it is Ordered,
// leases. A new consumer starts with the oldest message of the stream. Existing objects are not changed: if no subject of an
// existing stream matches Stream.Subject or one of its partitions, the error names the missing subjects. Setup may be
// called any number of times, by many processes at once. Run never calls it.
func (c *Consumer) Setup(ctx context.Context) error {
	for i, cfg := range c.cfg.streams() {
		if i == 0 {
			cfg.Subjects = c.cfg.notYet()
		}
		if err := c.cfg.call(ctx, "setup: stream "+cfg.Name, func(ctx context.Context) error {
			_, err := c.cfg.js.CreateStream(ctx, cfg)
			if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
				return nil
			}
			return err
		}); err != nil {
			return err
		}
	}
	last, since := uint64(0), time.Now()
	for ; ; _ = runloop.Sleep(ctx, openEvery) {
		is, err := c.parts[0].stat(ctx, c.cfg.places[0].stream)
		if err != nil {
			return err
		}
		if !slices.Equal(is.Config.Subjects, c.cfg.notYet()) {
			return c.complete(ctx, is.Config)
		}
		if is.State.LastSeq != last { // another process opens the stream
			last, since = is.State.LastSeq, time.Now()
		}
		if last > 0 && time.Since(since) < 2*c.cfg.Timeout {
			continue
		}
		if mine, err := c.mayOpen(ctx, last); err != nil {
			return err
		} else if mine {
			return c.open(ctx, is.Config)
		}
	}
}

// mayOpen reports whether this process opens the stream: of all that have seen the number last, the one whose message
// gets the next number. If that process has ended, the number stays, and the others try again.
func (c *Consumer) mayOpen(ctx context.Context, last uint64) (mine bool, err error) {
	err = c.cfg.call(ctx, "setup: open stream "+c.cfg.Stream.Name, func(ctx context.Context) error {
		ack, err := c.cfg.js.Publish(ctx, c.cfg.notYet()[0], nil)
		if errors.Is(err, jetstream.ErrNoStreamResponse) { // it is open
			return nil
		}
		mine = err == nil && ack.Sequence == last+1
		return err
	})
	return mine, err
}

// notYet is the subject of the new stream until Setup opens it. Only mayOpen publishes on it.
func (s *settings) notYet() []string { return []string{"holdfast." + s.Stream.Name + ".setup"} }

// open gives the new stream its subjects. A stream without a consumer confirms messages and deletes them, and a consumer
// of a subject needs the stream to have it. So a temporary consumer keeps all messages until the others exist.
//
// Only one process opens a stream: nats-server may store each message twice after two updates at once.
func (c *Consumer) open(ctx context.Context, cfg jetstream.StreamConfig) error {
	if err := c.cfg.call(ctx, "setup: open stream "+cfg.Name, func(ctx context.Context) error {
		if _, err := c.cfg.js.CreateOrUpdateConsumer(ctx, cfg.Name, jetstream.ConsumerConfig{
			Durable: c.cfg.keeper(), AckPolicy: jetstream.AckExplicitPolicy, InactiveThreshold: keeperTime,
		}); err != nil {
			return err
		}
		cfg.Subjects = c.cfg.streams()[0].Subjects
		_, err := c.cfg.js.UpdateStream(ctx, cfg)
		return err
	}); err != nil {
		return err
	}
	return c.complete(ctx, cfg)
}

// keeper is the name of the temporary consumer.
func (s *settings) keeper() string { return s.ConsumerConfig.Name + "=setup" }

// complete creates the missing durable consumers of an open stream. It ends the temporary consumer, also of a Setup that
// was interrupted.
func (c *Consumer) complete(ctx context.Context, cfg jetstream.StreamConfig) error {
	if err := c.setupConsumers(ctx, cfg); err != nil {
		return err
	}
	return c.cfg.call(ctx, "setup: delete consumer "+c.cfg.keeper(), func(ctx context.Context) error {
		err := c.cfg.js.DeleteConsumer(ctx, cfg.Name, c.cfg.keeper())
		if errors.Is(err, jetstream.ErrConsumerNotFound) {
			return nil
		}
		return err
	})
}

// setupConsumers creates the missing durable consumers.
func (c *Consumer) setupConsumers(ctx context.Context, is jetstream.StreamConfig) error {
	missed := check.Findings{Component: component}
	c.cfg.checkSubjects(is, &missed)
	if err := missed.Err(); err != nil {
		return err
	}
	for _, p := range c.cfg.places {
		for stream, filter := range map[string]string{p.stream: p.filter, p.retries: strings.TrimSuffix(p.later, "later") + "*"} {
			if err := c.cfg.call(ctx, "setup: consumer "+p.consumer+" of stream "+stream, func(ctx context.Context) error {
				_, err := c.cfg.js.Consumer(ctx, stream, p.consumer)
				if !errors.Is(err, jetstream.ErrConsumerNotFound) { // nats-server 2.9 would change it
					return err
				}
				_, err = c.cfg.js.CreateConsumer(ctx, stream, jetstream.ConsumerConfig{
					Durable: p.consumer, FilterSubject: filter, AckPolicy: jetstream.AckExplicitPolicy, AckWait: ackWait, MaxDeliver: -1, MaxAckPending: -1,
				})
				if errors.Is(err, jetstream.ErrConsumerExists) {
					return nil
				}
				return err
			}); err != nil {
				return err
			}
		}
	}
	return nil
}

// streams returns the streams that Setup creates.
func (s *settings) streams() []jetstream.StreamConfig {
	first := s.places[0]
	base := strings.TrimSuffix(first.members, "own.member.")
	subjects := []string{}
	for _, p := range s.places {
		subjects = append(subjects, p.filter)
	}
	all := []jetstream.StreamConfig{
		{Name: first.stream, Subjects: subjects, Retention: jetstream.InterestPolicy},
		{Name: first.retries, Subjects: []string{base + "retry.>"}, Retention: jetstream.WorkQueuePolicy},
		{Name: first.dead, Subjects: []string{base + "dead.>"}},
	}
	if s.Ordered {
		all = append(all, jetstream.StreamConfig{Name: first.owners, Subjects: []string{base + "own.>"}, MaxMsgsPerSubject: 1, MaxAge: leaseTime})
	}
	for i := range all {
		all[i].Replicas = s.Replicas
	}
	return all
}

// call bounds a call to the server and names the call in its error.
func (s *settings) call(ctx context.Context, what string, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, s.Timeout)
	defer cancel()
	return fault(what, do(ctx))
}

// fault names the failed call, and marks errors that Setup fixes.
func fault(what string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, jetstream.ErrStreamNotFound), errors.Is(err, jetstream.ErrConsumerNotFound):
		return fmt.Errorf("inboxnats: %s: %w: %w", what, driver.ErrMissing, err)
	}
	return fmt.Errorf("inboxnats: %s: %w", what, err)
}
