package inboxamqp

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/holdfast-go/holdfast/inbox"
)

const scope = "github.com/holdfast-go/holdfast/inbox/inboxamqp"

// maxPrefetch is where quorum queues end.
const maxPrefetch = 2000

// maxShort is the length of AMQP's short strings, such as queue names.
const maxShort = 255

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
	// Prefetch is how many messages the broker hands out before they are settled: from
	// Concurrency to 2000. 0 means twice Concurrency.
	Prefetch int
	// MaxBodyBytes is the largest body that is processed; a larger message is a dead letter
	// of class validation. 0 means inbox.MaxBodyBytes.
	MaxBodyBytes int

	// Retry says how often and how late a failed message is tried again. Its steps are the
	// retry queues.
	Retry inbox.RetryPolicy
	// DeadLetterPrefix is put before the names of the dead-letter queues: the class
	// validation goes to <prefix>failed.validation.
	DeadLetterPrefix string
	// Classes are the classes with a dead-letter queue of their own, besides the three of
	// package inbox. A failure of any other class goes to the queue of inbox.ClassDefault.
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

	// ShutdownTimeout is how long running messages may take once Run ends. Then their
	// context is cancelled with the cause inbox.ErrDraining. 0 means 60 s.
	ShutdownTimeout time.Duration
	// CallTimeout bounds the dial and every call to the broker. 0 means 10 s.
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
	c.Prefetch = cmp.Or(c.Prefetch, min(2*c.Concurrency, maxPrefetch))
	c.MaxBodyBytes = cmp.Or(c.MaxBodyBytes, inbox.MaxBodyBytes)
	c.Retry = c.Retry.WithDefaults()
	c.QueueType = cmp.Or(c.QueueType, Quorum)
	c.ShutdownTimeout = cmp.Or(c.ShutdownTimeout, 60*time.Second)
	c.CallTimeout = cmp.Or(c.CallTimeout, 10*time.Second)
	c.ConfirmTimeout = cmp.Or(c.ConfirmTimeout, 15*time.Second)
	c.Logger = cmp.Or(c.Logger, slog.Default()).With(slog.String("component", "inboxamqp"), slog.String("queue", c.Queue))
	return c
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
	return errors.Join(errors.Join(problems...), c.Retry.Validate(), validateClasses(c.DeadLetterPrefix, c.Classes))
}

func validateClasses(prefix string, classes []string) error {
	var problems []error
	if len(prefix) > 128 {
		problems = append(problems, errors.New("inboxamqp: the dead-letter prefix has more than 128 bytes"))
	}
	for _, class := range classes {
		if !inbox.ValidClass(class) {
			problems = append(problems, fmt.Errorf("inboxamqp: Classes: %q is no valid class", class))
		}
	}
	return errors.Join(problems...)
}

// allClasses are the classes with a dead-letter queue, without repetition.
func allClasses(own []string) []string {
	classes := append([]string{inbox.ClassDefault, inbox.ClassValidation, inbox.ClassUnrecoverable}, own...)
	slices.Sort(classes)
	return slices.Compact(classes)
}
