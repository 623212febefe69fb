package inboxamqp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/google/uuid"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

const scope = "github.com/holdfast-go/holdfast/inbox/inboxamqp"

// maxPrefetch is where quorum queues end.
const maxPrefetch = 2000

// maxShort is the length of AMQP's short strings, such as queue names.
const maxShort = 255

const day = 24 * time.Hour

// QueueType is the type of the queues that Setup declares.
type QueueType string

// The queue types.
const (
	Quorum  QueueType = "quorum"
	Classic QueueType = "classic"
)

// Binding routes messages of an exchange to the consumer's queue.
type Binding struct {
	Exchange string
	// Key is the routing key or pattern.
	Key string
}

// Config configures a Consumer. Only Queue is required.
type Config struct {
	// Queue is the queue to consume. The names of its retry queues begin with it.
	Queue string
	// Name tells consumers apart in dead letters and on the broker. Empty means Queue.
	Name string
	// Concurrency is how many messages are processed at once. 0 means 8.
	Concurrency int
	// Batch is how many messages are given to the processor together, at most: as many as
	// have gathered while all workers were busy. It is made for inboxpgx, which then needs
	// one transaction for all; there a Concurrency of 1 to 4 is enough. Messages that have
	// failed before are processed one by one. 0 means 1.
	Batch int
	// Prefetch is how many messages the broker hands out before they are settled: from
	// Concurrency to 2000. 0 means twice Concurrency times Batch, or 2000 if that is less.
	Prefetch int
	// MaxBodyBytes is the largest body that is processed; a larger message is a dead letter
	// of class validation. 0 means driver.MaxBodyBytes.
	MaxBodyBytes int

	// HandlerTimeout bounds the work on one message, waiting for a rate limit included. A batch
	// of n messages gets n times as long, together, but no more than a third of AckTimeout. The
	// context then ends, and the message has failed. A handler that has not returned 5 seconds
	// later is reported, by the log and by Ready. 0 means 60 s.
	HandlerTimeout time.Duration
	// AckTimeout is the broker's consumer_timeout, after which it takes unsettled messages
	// back. It bounds the time of a batch, and how long a message waits whose copy cannot be
	// published, and is used by Check. 0 means 30 min, the broker's own default.
	AckTimeout time.Duration

	// Ledger notes messages that are delivered more than once. Then the copies of a message
	// do not multiply when the consumer dies between the retry and its acknowledgement, and
	// a message during which the process ends again and again is not run any more. It is
	// asked for no message that goes well at its first delivery. Nil means none.
	Ledger driver.Ledger
	// MaxCrashes is how many times in a row the process may end while a message is being
	// processed, before that is a dead letter of class quarantined. The first time is not
	// known and not among them. From the second time on the message runs alone. 0 means 5.
	MaxCrashes int
	// KillSwitch pauses consuming when most messages fail. The zero value never does.
	KillSwitch KillSwitch
	// Health is asked every 5 seconds, and before anything is consumed, whether what the
	// processor needs is there; while it returns an error, or has not answered within 3 seconds,
	// the consumer is paused, and no message is tried. Nil means not asked.
	Health func(ctx context.Context) error
	// DeriveID is called for messages whose id is missing or not a UUID v7, for senders that
	// set none, and returns the id to use: the same for every copy of a message. uuid.Nil
	// or a panic refuses the message, as all are without the function.
	DeriveID func(m *inbox.Message) uuid.UUID

	// Retention is how long the processor remembers what it has processed, and DeadLetterAge
	// how long after its failure a message may be replayed; only Check uses them. 0 means 8
	// days and 5 days.
	Retention, DeadLetterAge time.Duration

	// Retry says how often and how late a failed message is tried again. Its steps are the
	// retry queues.
	Retry inbox.RetryPolicy
	// DeadLetterPrefix is put before the names of the dead-letter queues: the class
	// validation goes to <prefix>failed.validation.
	DeadLetterPrefix string
	// Classes are the classes with a dead-letter queue of their own, besides the four of
	// package inbox. A failure of any other class goes to the queue of driver.ClassDefault.
	Classes []string

	// Bindings are made by Setup, and by nothing else.
	Bindings []Binding
	// QueueType is what Setup declares. Empty means Quorum.
	QueueType QueueType

	// TimeLimit, MessageLimit and MemoryLimit end Run in good order, so that a supervisor
	// starts the process afresh: after this time, after this many messages were handed to the
	// processor, or when the Go runtime holds more than this many bytes. 0 means no limit.
	TimeLimit    time.Duration
	MessageLimit int
	MemoryLimit  uint64

	// ShutdownTimeout is how long Run takes to end, at most. The context of running messages is
	// cancelled before that, with the cause inbox.ErrDraining: a tenth of it, but no more than
	// 6 s, is left to settle them. 0 means 60 s.
	ShutdownTimeout time.Duration
	// CallTimeout bounds the dial, every call to the broker and every call of the Ledger. 0 means 5 s.
	CallTimeout time.Duration
	// ConfirmTimeout bounds the wait for the broker's confirm of a copy. 0 means 15 s.
	ConfirmTimeout time.Duration

	// Logger is told of failed messages and lost connections. Nil means slog.Default().
	Logger *slog.Logger
	// TracerProvider makes one span per message, linked to the sender's. Nil means the global one.
	TracerProvider trace.TracerProvider
	// MeterProvider counts outcomes. Nil means the global one.
	MeterProvider metric.MeterProvider
}

func (c Config) withDefaults() Config {
	c.Name = cmp.Or(c.Name, c.Queue)
	c.Concurrency = cmp.Or(c.Concurrency, 8)
	c.Batch = cmp.Or(c.Batch, 1)
	c.Prefetch = cmp.Or(c.Prefetch, min(2*c.Concurrency*c.Batch, maxPrefetch))
	c.AckTimeout = cmp.Or(c.AckTimeout, 30*time.Minute)
	c.HandlerTimeout = cmp.Or(c.HandlerTimeout, 60*time.Second)
	c.MaxCrashes = cmp.Or(c.MaxCrashes, 5)
	c.Retention = cmp.Or(c.Retention, 8*day)
	c.DeadLetterAge = cmp.Or(c.DeadLetterAge, 5*day)
	c.MaxBodyBytes = cmp.Or(c.MaxBodyBytes, driver.MaxBodyBytes)
	c.Retry = driver.RetryDefaults(c.Retry)
	c.QueueType = cmp.Or(c.QueueType, Quorum)
	c.ShutdownTimeout = cmp.Or(c.ShutdownTimeout, 60*time.Second)
	c.CallTimeout = cmp.Or(c.CallTimeout, 5*time.Second)
	c.ConfirmTimeout = cmp.Or(c.ConfirmTimeout, 15*time.Second)
	c.Logger = cmp.Or(c.Logger, slog.Default()).With(slog.String("component", "inboxamqp"), slog.String("queue", c.Queue))
	return c
}

// limit is how long the processor may take for n messages together.
func (c Config) limit(n int) time.Duration {
	most := max(c.HandlerTimeout, c.AckTimeout/3)
	if c.HandlerTimeout > most/time.Duration(n) {
		return most
	}
	return time.Duration(n) * c.HandlerTimeout
}

func (c Config) validate() error {
	var problems []error
	fail := func(format string, args ...any) {
		problems = append(problems, fmt.Errorf("inboxamqp: Config."+format, args...))
	}
	longest := retryQueue(c.Queue, c.Retry.MaxDelay)
	if c.Queue == "" || len(longest) > maxShort {
		fail("Queue is empty, or so long that %d bytes do not hold the names of its retry queues", maxShort)
	}
	if len(c.Name) > maxShort-40 {
		fail("Name has more than %d bytes", maxShort-40)
	}
	if c.Concurrency < 1 || c.Concurrency > maxPrefetch {
		fail("Concurrency %d is not from 1 to %d", c.Concurrency, maxPrefetch)
	}
	if c.Prefetch < c.Concurrency || c.Prefetch > maxPrefetch {
		fail("Prefetch %d is not from Concurrency (%d) to %d", c.Prefetch, c.Concurrency, maxPrefetch)
	}
	if c.Batch < 1 || c.Batch > maxPrefetch {
		fail("Batch %d is not from 1 to %d", c.Batch, maxPrefetch)
	}
	if c.MaxCrashes < 1 {
		fail("MaxCrashes %d is negative", c.MaxCrashes)
	}
	if c.MaxBodyBytes < 0 || c.MessageLimit < 0 {
		fail("MaxBodyBytes or MessageLimit is negative")
	}
	if c.QueueType != Quorum && c.QueueType != Classic {
		fail("QueueType %q is neither quorum nor classic", c.QueueType)
	}
	for _, d := range [...]struct {
		name  string
		value time.Duration
	}{
		{"HandlerTimeout", c.HandlerTimeout},
		{"AckTimeout", c.AckTimeout},
		{"Retention", c.Retention},
		{"DeadLetterAge", c.DeadLetterAge},
		{"TimeLimit", c.TimeLimit},
		{"ShutdownTimeout", c.ShutdownTimeout},
		{"CallTimeout", c.CallTimeout},
		{"ConfirmTimeout", c.ConfirmTimeout},
	} {
		if d.value < 0 {
			fail("%s %v is negative", d.name, d.value)
		}
	}
	for i, b := range c.Bindings {
		if b.Exchange == "" || len(b.Exchange) > maxShort || len(b.Key) > maxShort {
			fail("Bindings[%d] names no exchange, or has a name of more than %d bytes", i, maxShort)
		}
	}
	return errors.Join(errors.Join(problems...), driver.CheckRetry(c.Retry), c.KillSwitch.validate(), validateClasses(c.DeadLetterPrefix, c.Classes))
}

func validateClasses(prefix string, classes []string) error {
	var problems []error
	if len(prefix) > 128 {
		problems = append(problems, errors.New("inboxamqp: the dead-letter prefix has more than 128 bytes"))
	}
	for _, class := range classes {
		if !driver.ValidClass(class) {
			problems = append(problems, fmt.Errorf("inboxamqp: Classes: %q is no valid class", class))
		}
	}
	return errors.Join(problems...)
}
