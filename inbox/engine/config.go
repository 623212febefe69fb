package engine

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// Config says how a consumer runs. A transport makes it of its own Config.
type Config struct {
	inbox.ConsumerConfig

	// Queue is the name of what the source reads, for logs, metrics and the default of Name. Required.
	Queue string
	// Package is the name of the transport's package, such as inboxamqp. It is put before the texts
	// of errors, is the component in logs, and names the metrics and the instrumentation scope. Required.
	Package string
	// Timeout bounds every note in the processor's ledger. Default: 5 s.
	Timeout time.Duration
	// MaxBodyBytes is the largest body that the processor is given. Default: 16 MiB.
	MaxBodyBytes int
	// Solo is for several consumers in one process. nil: nothing is shared.
	Solo *Solo
}

// settings are a Config with its defaults, and what else a consumer goes by.
type settings struct {
	Config
	traits     driver.Traits
	ledger     driver.Ledger     // of the processor; nil: none
	limiter    driver.Limiter    // of the processor; nil: none
	background driver.Background // of the processor; nil: none
	pausable   driver.Pausable   // the processor; nil: it is not
	parker     driver.Parker     // the processor, where keys are to be stopped; nil: they go on
	classes    map[string]bool   // with a place of their own
}

func newSettings(source driver.Source, p inbox.Processor, cfg Config) *settings {
	cfg.ConsumerConfig = driver.ConsumerDefaults(cfg.ConsumerConfig, cfg.Queue)
	cfg.Timeout = cmp.Or(cfg.Timeout, 5*time.Second)
	cfg.MaxBodyBytes = cmp.Or(cfg.MaxBodyBytes, driver.MaxBodyBytes)
	cfg.Logger = cfg.Logger.With(slog.String("component", cfg.Package), slog.String("queue", cfg.Queue))
	s := &settings{Config: cfg, classes: map[string]bool{}}
	if source != nil {
		s.traits = source.Traits()
	}
	if d, ok := p.(driver.Deduplicator); ok {
		s.ledger = d.Ledger()
	}
	s.limiter, _ = p.(driver.Limiter)
	s.background, _ = p.(driver.Background)
	s.pausable, _ = p.(driver.Pausable)
	s.parker = driver.ParkerOf(p, cfg.ConsumerConfig)
	if parker, ok := p.(driver.Parker); ok {
		parker.Park(cfg.ConsumerConfig)
	}
	for _, class := range driver.Places(s.traits, cfg.Classes) {
		s.classes[class] = true
	}
	return s
}

// validate returns every violation in one error.
func (s *settings) validate() error {
	var problems []error
	fail := func(format string, args ...any) {
		problems = append(problems, fmt.Errorf(s.Package+": "+format, args...))
	}
	if s.Timeout < 0 {
		fail("Config.Timeout %v is negative", s.Timeout)
	}
	if s.MaxBodyBytes < 0 {
		fail("Config.MaxBodyBytes %d is negative", s.MaxBodyBytes)
	}
	if s.traits.MaxWindow > 0 && s.Prefetch > s.traits.MaxWindow {
		fail("ConsumerConfig.Prefetch %d is more than the transport's %d", s.Prefetch, s.traits.MaxWindow)
	}
	if s.Ordered && !s.traits.Exclusive {
		fail("ConsumerConfig.Ordered needs a source that serves one session at a time")
	}
	if s.ParkKeys && !s.Ordered {
		fail("ConsumerConfig.ParkKeys needs Ordered")
	}
	if s.ParkKeys && s.parker == nil {
		fail("ConsumerConfig.ParkKeys needs a processor that can keep messages")
	}
	return errors.Join(errors.Join(problems...), driver.CheckConsumer(s.ConsumerConfig))
}

// limit is how long the processor may take for n messages together.
func (s *settings) limit(n int) time.Duration {
	return driver.CallTimeout(s.ConsumerConfig, s.traits.Hold, n)
}

// tracks reports whether a message's runs are noted in the ledger: not at its first delivery, so
// that what goes well pays nothing.
func (s *settings) tracks(m *inbox.Message) bool {
	return s.ledger != nil && (m.Redelivered || m.Attempt > 1 || m.Replays > 0) && m.Validate() == nil
}

// place names where failed messages go, for logs and Ready.
func (s *settings) place(o order, class string) string {
	if o.target == toStop {
		return "the store of stopped keys"
	}
	if o.target != driver.ToDead {
		return "the retries of " + s.Queue
	}
	if !s.classes[class] {
		class = driver.ClassDefault
	}
	return "queue " + driver.DeadLetterQueue(s.DeadLetterPrefix, class)
}

// metric is the name of a metric of the transport.
func (s *settings) metric(name string) string {
	return "holdfast.inbox." + strings.TrimPrefix(s.Package, "inbox") + "." + name
}

// errorf makes an error in the transport's name.
func (s *settings) errorf(format string, args ...any) error {
	return fmt.Errorf(s.Package+": "+format, args...)
}

// deadLetters adds the dead letters that stopped their keys to those of a transport.
func (s *settings) deadLetters(transport driver.DeadLetters) driver.DeadLetters {
	if s.parker == nil {
		return transport
	}
	return driver.JoinDeadLetters(transport, s.parker.Parked())
}
