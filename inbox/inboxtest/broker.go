package inboxtest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/engine"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
	"github.com/holdfast-go/holdfast/inbox/internal/memqueue"
	"github.com/holdfast-go/holdfast/internal/prove"
	outboxdriver "github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// Broker replaces RabbitMQ or Redis between a relay and its consumers, in memory: queues with at-least-once
// delivery. It is a publisher for outbox.NewRelay. It is safe for concurrent use.
type Broker struct {
	queues *memqueue.Broker

	mu       sync.Mutex
	bindings []binding
}

// binding is a queue with the patterns of the message names that it gets.
type binding struct {
	queue    *memqueue.Queue
	patterns []string
}

// NewBroker returns a Broker without queues: NewConsumer declares them.
func NewBroker() *Broker { return &Broker{queues: memqueue.NewBroker()} }

// bind routes the messages that match the patterns to a queue.
func (b *Broker) bind(queue *memqueue.Queue, patterns []string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := range b.bindings {
		if b.bindings[i].queue == queue {
			b.bindings[i].patterns = append(b.bindings[i].patterns, patterns...)
			return
		}
	}
	b.bindings = append(b.bindings, binding{queue, patterns})
}

// System implements driver.Identified of outbox.
func (*Broker) System() string { return "memory" }

// Publish implements driver.Publisher of outbox: it puts a copy of the message into every queue with a
// matching pattern. Without such a queue the message is unroutable.
func (b *Broker) Publish(ctx context.Context, m outboxdriver.Message, done func(error)) {
	if err := ctx.Err(); err != nil {
		done(&outboxdriver.PublishError{Class: outboxdriver.Unavailable, Err: err})
		return
	}
	err := b.route(&inbox.Message{
		ID: m.ID, Name: m.Name, Key: m.Key, Body: m.Body, ContentType: m.ContentType, Headers: m.Headers, PublishedAt: m.CreatedAt,
	})
	switch {
	case errors.Is(err, errUnwanted):
		err = &outboxdriver.PublishError{Class: outboxdriver.Unroutable, Err: err}
	case err != nil:
		err = &outboxdriver.PublishError{Class: outboxdriver.Permanent, Err: err}
	}
	done(err)
}

// Send is Publish for a message in the consumer's form. It accepts invalid messages: their faults show at
// delivery, as with a real broker. It resets Queue, Attempt and failures. It returns ctx's error if ctx has
// ended. It returns an error for nil, for a message that matches no queue, for a body over 16 MiB, a name
// over 255 bytes and headers over 128 KiB.
func (b *Broker) Send(ctx context.Context, m *inbox.Message) error {
	if m == nil {
		return errors.New("inboxtest: message is nil")
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("inboxtest: send: %w", err)
	}
	return b.route(m)
}

var errUnwanted = errors.New("no queue has a matching name")

// route puts a copy of a message into every queue with a matching pattern.
func (b *Broker) route(m *inbox.Message) error {
	err := fmt.Errorf("inboxtest: message named %q: %w", m.Name, errUnwanted)
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, to := range b.bindings {
		if !slices.ContainsFunc(to.patterns, func(pattern string) bool { return matches(pattern, m.Name) }) {
			continue
		}
		if err = to.queue.Put(m); err != nil {
			return fmt.Errorf("inboxtest: message named %q: %w", m.Name, err)
		}
	}
	return err
}

// matches compares words between dots: * stands for one, # for any number.
func matches(pattern, name string) bool {
	return matchWords(strings.Split(pattern, "."), strings.Split(name, "."))
}

func matchWords(pattern, words []string) bool {
	switch {
	case len(pattern) == 0:
		return len(words) == 0
	case pattern[0] == "#":
		return matchWords(pattern[1:], words) || len(words) > 0 && matchWords(pattern, words[1:])
	case len(words) == 0 || pattern[0] != "*" && pattern[0] != words[0]:
		return false
	}
	return matchWords(pattern[1:], words[1:])
}

// Idle waits until every queue is empty, with no message that waits for a retry or is being processed. It
// returns ctx's error if ctx ends first. Messages are processed only by consumers that run.
func (b *Broker) Idle(ctx context.Context) error {
	if err := b.queues.Idle(ctx); err != nil {
		return fmt.Errorf("inboxtest: not idle: %w", err)
	}
	return nil
}

// Queue selects the messages of a Consumer. The zero value works. A queue with an Ordered consumer serves one
// consumer at a time. DeadLetterPrefix has no effect in memory.
type Queue struct {
	// Name is the queue's name. Default: the consumer's name.
	Name string
	// Names are the names of the messages for the queue, or patterns such as order.*, where * stands for one
	// word between dots and # for any number. Default: all.
	Names []string
	// Fault returns the outcome of each step. It must not block; m is nil if the step has no message. It is
	// called from many goroutines. DeliverTwice is one. Optional.
	Fault func(at Step, m *inbox.Message) Outcome
}

func (c Queue) withDefaults() Queue {
	if len(c.Names) == 0 {
		c.Names = []string{"#"}
	}
	return c
}

func (c Queue) fault() memqueue.Fault {
	if c.Fault == nil {
		return nil
	}
	return func(at memqueue.Step, m *inbox.Message) memqueue.Outcome {
		return memqueue.Outcome(c.Fault(Step(at), m))
	}
}

func check(b *Broker, queue string) error {
	var problems []error
	if b == nil {
		problems = append(problems, errors.New("inboxtest: Broker is nil"))
	}
	if queue == "" {
		problems = append(problems, errors.New("inboxtest: the queue is empty"))
	}
	return errors.Join(problems...)
}

// Consumer passes the messages of one queue of a Broker to a Processor and settles them by the results. It is
// the production consumer on queues in memory. Its methods may be called from any goroutine.
type Consumer struct {
	engine            *engine.Consumer
	letters, retrying inbox.DeadLetters
}

// NewConsumer returns a consumer of a queue, and declares the queue. Several consumers may share one.
func NewConsumer(b *Broker, queue Queue, p inbox.Processor, cfg inbox.ConsumerConfig) (*Consumer, error) {
	return newConsumer(b, queue, p, cfg, 0)
}

func newConsumer(b *Broker, from Queue, p inbox.Processor, cfg inbox.ConsumerConfig, maxBody int) (*Consumer, error) {
	from = from.withDefaults()
	var queue string
	cfg.Name, queue = driver.Names(cfg, p, from.Name)
	problem := check(b, queue)
	if problem != nil {
		b = NewBroker() // so that the error has all violations
	}
	place := b.queues.Queue(queue, cfg.Classes...)
	source := place.Source(memqueue.Options{Exclusive: cfg.Ordered, Fault: from.fault()})
	consumer, err := engine.New(source, p, engine.Config{
		ConsumerConfig: cfg, Queue: queue, Package: "inboxtest", MaxBodyBytes: maxBody,
	})
	if err := errors.Join(problem, err); err != nil {
		return nil, err
	}
	b.bind(place, from.Names)
	retention := driver.DefaultRetention
	if d, ok := p.(driver.Deduplicator); ok {
		retention = d.Retention()
	}
	logger := cmp.Or(cfg.Logger, slog.Default()).With(slog.String("component", "inboxtest"), slog.String("queue", queue))
	return &Consumer{
		engine:   consumer,
		letters:  driver.NewDeadLetters(driver.JoinDeadLetters(source.DeadLetters(), driver.ParkedBy(p, cfg)), retention, logger),
		retrying: driver.NewRetrying(source.Retrying(), retention, logger),
	}, nil
}

// Run delivers until ctx ends or a limit of the config is reached. Then it receives no more messages,
// requeues those that have not started, waits for running handlers, and returns nil, after ShutdownTimeout at
// the latest. Unfinished messages stay in the queue for the next Run. Calling it while it runs is an error.
func (c *Consumer) Run(ctx context.Context) error { return c.engine.Run(ctx) }

// Ready returns nil while Run works.
func (c *Consumer) Ready(ctx context.Context) error { return c.engine.Ready(ctx) }

// Counts returns the numbers of deliveries that this process has settled. It makes no server call.
func (c *Consumer) Counts() driver.Counts { return c.engine.Counts() }

// Running returns the messages in work in this process, the oldest first. It makes no server call.
func (c *Consumer) Running() []driver.Running { return c.engine.Running() }

// Stats counts the messages of the queue, even if Run is not running.
func (c *Consumer) Stats(ctx context.Context) (inbox.Stats, error) { return c.engine.Stats(ctx) }

// DeadLetters returns the dead letters of the queue.
func (c *Consumer) DeadLetters() inbox.DeadLetters { return c.letters }

// Retrying returns the messages that wait for their next attempt, with the methods of dead letters: Replay makes one due
// now, or after Replay.Delay. An ordered consumer delays its messages in the process, and they are not listed.
func (c *Consumer) Retrying() inbox.DeadLetters { return c.retrying }

// Step is a step between a consumer and its queue, for Queue.Fault.
type Step int

// The steps that tests name. AtReceive, AtAck, AtGiveBack and AtMove have a message. String names the others: "start" and
// "stop" of deliveries, and "scan", where a dead letter is returned or removed.
const (
	AtOpen     = Step(memqueue.Open)    // a session begins
	AtReceive  = Step(memqueue.Receive) // a message is delivered
	AtAck      = Step(memqueue.Ack)     // it is acknowledged: its effect is durable already
	AtGiveBack = Step(memqueue.GiveBack)
	AtMove     = Step(memqueue.Move) // it will be retried later, or becomes a dead letter
	AtClose    = Step(memqueue.Close)
)

// String returns the name of the step, such as "receive" or "give back".
func (s Step) String() string {
	names := [...]string{"", "open", "start", "receive", "ack", "give back", "move", "stop", "close", "scan"}
	if s <= 0 || int(s) >= len(names) {
		return "unknown"
	}
	return names[s]
}

// Outcome is the outcome of a step.
type Outcome int

// The outcomes. If a call of a session fails, the session ends: unsettled messages are redelivered after the
// next one was opened.
const (
	OK         = Outcome(memqueue.OK)
	FailBefore = Outcome(memqueue.FailBefore) // it fails without an effect
	FailAfter  = Outcome(memqueue.FailAfter)  // it fails although it took effect
	Hang       = Outcome(memqueue.Hang)       // it fails after 10 s without an effect
	EndSession = Outcome(memqueue.EndSession) // it succeeds, and the session is lost right after it

	// Lose reports success without an effect: the message is redelivered at once. AtReceive that is a crash
	// before the message was processed, AtAck a crash after it. For other steps it is OK.
	Lose = Outcome(memqueue.Lose)
	// Refuse is for AtMove: the queue of retries or dead letters rejects the message. For other steps it is
	// OK.
	Refuse = Outcome(memqueue.Refuse)
)

// DeliverTwice is a Queue.Fault: every message is delivered again after it was processed.
func DeliverTwice(at Step, m *inbox.Message) Outcome {
	if at == AtAck && !m.Redelivered {
		return Lose
	}
	return OK
}

// New returns an inboxpgx.Store with its entries and ledger in memory. The Transactor is a
// txretrytest.Manager: an entry is undone if its transaction rolls back. Each new entry removes entries older
// than Config.Retention, except those of parked messages. Config.Entries is ignored.
func New(t txretry.Transactor, consumer string, cfg inboxpgx.Config) (*inboxpgx.Store, error) {
	cfg.Entries = memory.NewEntries(cmp.Or(cfg.Retention, driver.DefaultRetention))
	return inboxpgx.New(t, consumer, cfg)
}

// handlerTime is the time limit of one delivery.
const handlerTime = 30 * time.Second

// Prove runs the handler of a message on a real database under faults, as txretrytest.Proof describes. start
// builds a process like your program does: with the given pool it creates the inboxpgx.Store and registers
// the handlers. Each attempt is one delivery of the message. It is redelivered until it is processed, or
// until its error makes it a dead letter, which is a failure.
//
// The message needs a Name and a Body. If it has no ID, Prove sets one, shown as <key> in Proof.Rows: one for
// all schedules, or, with Proof.Effects, one for each, so that another side that deduplicates by it sees a
// new message. If you set the ID, Proof.Reset must also reset the other side.
func Prove(t txretrytest.TB, p txretrytest.Proof, m inbox.Message, start func(pool *pgxpool.Pool) (inbox.Processor, error)) {
	t.Helper()
	work := prove.Work{
		Name: "inboxtest.Prove", Keyed: true,
		Start: func(_ context.Context, pool *pgxpool.Pool) (func(ctx context.Context) prove.Outcome, error) {
			processor, err := start(pool)
			sent := m
			return func(ctx context.Context) prove.Outcome { return deliver(ctx, processor, sent) }, err
		},
	}
	if m.ID == uuid.Nil {
		work.Fresh = func() uuid.UUID {
			m.ID = uuid.Must(uuid.NewV7())
			return m.ID
		}
	}
	prove.Run(t, prove.Proof(p), work)
}

func deliver(ctx context.Context, p inbox.Processor, m inbox.Message) prove.Outcome {
	ctx, cancel := context.WithTimeout(ctx, handlerTime)
	defer cancel()
	err := p.Process(ctx, []*inbox.Message{&m})[0]
	return prove.Outcome{Err: err, GivenUp: driver.Classify(err).Action == driver.ActionDead}
}
