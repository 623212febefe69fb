package inboxtest

import (
	"cmp"
	"context"
	"errors"
	"log/slog"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/engine"
	"github.com/holdfast-go/holdfast/inbox/internal/memqueue"
)

// Config configures a Consumer. The zero value works.
type Config struct {
	// ConsumerConfig is as for every consumer. A queue with an Ordered consumer serves one consumer
	// at a time. DeadLetterPrefix changes nothing in memory.
	inbox.ConsumerConfig
	// Names are the names of the messages that come to the queue, or patterns such as order.*,
	// where * stands for one word between dots and # for any number. Default: all.
	Names []string
	// Fault is asked what becomes of each step, and must not block; m is nil where the step is none
	// of a message's. It is called from many goroutines. DeliverTwice is one. Optional.
	Fault func(at Step, m *inbox.Message) Outcome
}

func (c Config) withDefaults() Config {
	if len(c.Names) == 0 {
		c.Names = []string{"#"}
	}
	return c
}

func (c Config) fault() memqueue.Fault {
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

// Consumer hands the messages of one queue of a Broker to a Processor and settles them by its
// answers. It is the consumer of production on queues in memory. Its methods may be called from any
// goroutine.
type Consumer struct {
	engine  *engine.Consumer
	letters inbox.DeadLetters
}

// NewConsumer returns a consumer of a queue, which it declares. Several may share one.
func NewConsumer(b *Broker, queue string, p inbox.Processor, cfg Config) (*Consumer, error) {
	return newConsumer(b, queue, p, cfg, 0)
}

func newConsumer(b *Broker, queue string, p inbox.Processor, cfg Config, maxBody int) (*Consumer, error) {
	cfg = cfg.withDefaults()
	problem := check(b, queue)
	if problem != nil {
		b = NewBroker() // so that the error names all that is wrong
	}
	place := b.queues.Queue(queue, cfg.Classes...)
	source := place.Source(memqueue.Options{Exclusive: cfg.Ordered, Fault: cfg.fault()})
	consumer, err := engine.New(source, p, engine.Config{
		ConsumerConfig: cfg.ConsumerConfig, Queue: queue, Package: "inboxtest", MaxBodyBytes: maxBody,
	})
	if err := errors.Join(problem, err); err != nil {
		return nil, err
	}
	b.bind(place, cfg.Names)
	retention := driver.DefaultRetention
	if d, ok := p.(driver.Deduplicator); ok {
		retention = d.Retention()
	}
	logger := cmp.Or(cfg.Logger, slog.Default()).With(slog.String("component", "inboxtest"), slog.String("queue", queue))
	return &Consumer{consumer, driver.NewDeadLetters(driver.JoinDeadLetters(source.DeadLetters(), driver.ParkedBy(p, cfg.ConsumerConfig)), retention, logger)}, nil
}

// Run delivers until ctx ends, or a limit of the Config is reached. Then it takes no further
// message, gives back what is not begun, lets the rest finish, and returns nil, after ShutdownTimeout
// at the latest. What was not finished is in the queue for the next Run. Calling it while it runs
// is an error.
func (c *Consumer) Run(ctx context.Context) error { return c.engine.Run(ctx) }

// Ready returns nil while Run is at work.
func (c *Consumer) Ready(ctx context.Context) error { return c.engine.Ready(ctx) }

// Stats counts the messages of the queue, whether Run is at work or not.
func (c *Consumer) Stats(ctx context.Context) (inbox.Stats, error) { return c.engine.Stats(ctx) }

// DeadLetters returns the dead letters of the queue.
func (c *Consumer) DeadLetters() inbox.DeadLetters { return c.letters }

// Step is a step between a consumer and its queue at which Config.Fault may have something go wrong.
type Step int

// The steps. Those of a message are asked about each of them, AtScan when a dead letter is returned
// or removed; the others are asked without a message.
const (
	AtOpen     = Step(memqueue.Open)    // a session begins
	AtStart    = Step(memqueue.Start)   // it asks for deliveries
	AtReceive  = Step(memqueue.Receive) // a message is delivered
	AtAck      = Step(memqueue.Ack)     // it is acknowledged: its effect is durable already
	AtGiveBack = Step(memqueue.GiveBack)
	AtMove     = Step(memqueue.Move) // it is to be retried later, or to be a dead letter
	AtStop     = Step(memqueue.Stop) // no more deliveries, as before a pause
	AtClose    = Step(memqueue.Close)
	AtScan     = Step(memqueue.Scan)
)

// Outcome is what becomes of a step.
type Outcome int

// The outcomes. A call of a session that fails ends the session: what is not settled comes again,
// redelivered, after the next one was opened.
const (
	OK         = Outcome(memqueue.OK)
	FailBefore = Outcome(memqueue.FailBefore) // it fails, and nothing has happened
	FailAfter  = Outcome(memqueue.FailAfter)  // it fails although it has happened
	Hang       = Outcome(memqueue.Hang)       // it fails after 10 s, and nothing has happened
	EndSession = Outcome(memqueue.EndSession) // it works, and the session is lost right after it

	// Lose says that it worked, and it has not: the message comes again at once, redelivered. AtReceive
	// it is the crash before a message was processed, AtAck the crash after it. It is OK elsewhere.
	Lose = Outcome(memqueue.Lose)
	// Refuse is for AtMove: the place of retries or dead letters takes none. It is OK elsewhere.
	Refuse = Outcome(memqueue.Refuse)
)

// DeliverTwice is a Config.Fault: every message comes once more after it was processed.
func DeliverTwice(at Step, m *inbox.Message) Outcome {
	if at == AtAck && !m.Redelivered {
		return Lose
	}
	return OK
}
