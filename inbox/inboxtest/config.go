package inboxtest

import (
	"errors"
	"log/slog"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// pauseTime is how long nothing is delivered after a processor was inbox.Unavailable.
const pauseTime = time.Second

// CrashPoint is a place in a delivery where Config.Crash may end it.
type CrashPoint int

const (
	// BeforeProcess is when the message has been taken from the queue.
	BeforeProcess CrashPoint = iota + 1
	// BeforeSettle is when the processor has answered, but the broker does not know yet:
	// the effect of a processed message is durable, its acknowledgement is lost.
	BeforeSettle
)

// Config configures a Consumer. The zero value works.
type Config struct {
	// ConsumerConfig is as for every consumer. Prefetch, MaxCrashes, DeadLetterPrefix, Classes and
	// the providers of telemetry change nothing in memory.
	inbox.ConsumerConfig
	// Names are the names of the messages that come to the queue, or patterns such as order.*,
	// where * stands for one word between dots and # for any number. Default: all.
	Names []string
	// DeliverTwice delivers every message once more after it was acknowledged.
	DeliverTwice bool
	// Crash is asked at each point of each delivery; true loses the delivery there, so that the
	// message comes again, redelivered and uncounted. It is called from many goroutines. Optional.
	Crash func(at CrashPoint, m *inbox.Message) bool
}

func (c Config) withDefaults(queue string) Config {
	c.ConsumerConfig = driver.ConsumerDefaults(c.ConsumerConfig, queue)
	c.Logger = c.Logger.With(slog.String("component", "inboxtest"), slog.String("queue", queue))
	if len(c.Names) == 0 {
		c.Names = []string{"#"}
	}
	if c.Crash == nil {
		c.Crash = func(CrashPoint, *inbox.Message) bool { return false }
	}
	return c
}

func (c Config) validate(b *Broker, queue string, p inbox.Processor) error {
	var problems []error
	if b == nil {
		problems = append(problems, errors.New("inboxtest: Broker is nil"))
	}
	if queue == "" {
		problems = append(problems, errors.New("inboxtest: the queue is empty"))
	}
	if p == nil {
		problems = append(problems, errors.New("inboxtest: Processor is nil"))
	}
	return errors.Join(errors.Join(problems...), driver.CheckConsumer(c.ConsumerConfig))
}
