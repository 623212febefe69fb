package inboxtest

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

const (
	defaultQueue           = "inbox"
	defaultPause           = time.Second
	defaultShutdownTimeout = 60 * time.Second
)

// CrashPoint is a place in a delivery where Config.Crash may end it.
type CrashPoint int

const (
	// BeforeProcess is when the message has been taken from the queue.
	BeforeProcess CrashPoint = iota + 1
	// BeforeSettle is when the processor has answered, but the broker does not know yet:
	// the effect of a processed message is durable, its acknowledgement is lost.
	BeforeSettle
)

// Config configures a Broker. The zero value is usable.
type Config struct {
	// Queue is the Queue of every message; empty means "inbox".
	Queue string
	// Consumer names who gives messages up, in dead letters; empty means the queue.
	Consumer string
	// Concurrency is how many messages each Run works on at once; 0 means 1.
	Concurrency int
	// Batch is how many messages are given to the processor together, at most: those that
	// are in the queue. Messages that have failed before come alone. 0 means 1.
	Batch int
	// MaxBodyBytes is the largest body that is processed; a larger message is a dead letter of
	// class validation. 0 means driver.MaxBodyBytes.
	MaxBodyBytes int
	// Retry decides over failed messages.
	Retry inbox.RetryPolicy
	// Pause is how long nothing is delivered after a processor was inbox.Unavailable. Other
	// messages come before the one that failed. 0 means 1 s.
	Pause time.Duration
	// ShutdownTimeout is how long running handlers may go on after Run's context has
	// ended, before theirs does, with the cause inbox.ErrDraining. 0 means 60 s.
	ShutdownTimeout time.Duration
	// DeliverTwice delivers every message once more after it was acknowledged.
	DeliverTwice bool
	// Crash, if set, is asked at each point of each delivery; true loses the delivery
	// there, so that the message comes again, redelivered and uncounted. It is called from many goroutines.
	Crash func(at CrashPoint, m *inbox.Message) bool
	// Rand returns numbers from 0 up to 1 that select the jitter; nil means math/rand/v2.
	// It is called from many goroutines.
	Rand func() float64
	// Logger receives failed deliveries; nil means slog.Default().
	Logger *slog.Logger
}

func (c Config) withDefaults() Config {
	if c.Queue == "" {
		c.Queue = defaultQueue
	}
	if c.Consumer == "" {
		c.Consumer = c.Queue
	}
	if c.Concurrency == 0 {
		c.Concurrency = 1
	}
	if c.Batch == 0 {
		c.Batch = 1
	}
	if c.MaxBodyBytes == 0 {
		c.MaxBodyBytes = driver.MaxBodyBytes
	}
	if c.Pause == 0 {
		c.Pause = defaultPause
	}
	if c.ShutdownTimeout == 0 {
		c.ShutdownTimeout = defaultShutdownTimeout
	}
	if c.Crash == nil {
		c.Crash = func(CrashPoint, *inbox.Message) bool { return false }
	}
	if c.Rand == nil {
		c.Rand = rand.Float64
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

func (c Config) validate() error {
	problems := []error{driver.CheckRetry(c.Retry)}
	if c.Concurrency < 0 {
		problems = append(problems, fmt.Errorf("inboxtest: Config.Concurrency %d is negative", c.Concurrency))
	}
	if c.Batch < 0 {
		problems = append(problems, fmt.Errorf("inboxtest: Config.Batch %d is negative", c.Batch))
	}
	if c.MaxBodyBytes < 0 {
		problems = append(problems, fmt.Errorf("inboxtest: Config.MaxBodyBytes %d is negative", c.MaxBodyBytes))
	}
	if c.Pause < 0 {
		problems = append(problems, fmt.Errorf("inboxtest: Config.Pause %v is negative", c.Pause))
	}
	if c.ShutdownTimeout < 0 {
		problems = append(problems, fmt.Errorf("inboxtest: Config.ShutdownTimeout %v is negative", c.ShutdownTimeout))
	}
	return errors.Join(problems...)
}
