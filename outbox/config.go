package outbox

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/holdfast-go/holdfast/internal/backoff"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// RelayConfig tunes a Relay. The zero value works.
type RelayConfig struct {
	// Transports are further publishers by the name in Message.Transport. The name "" is reserved for
	// the publisher passed to NewRelay. Optional.
	Transports map[string]driver.Publisher

	// BatchSize is the maximum number of messages per claim, at most 10,000. Up to three batches are
	// in flight at once. Default: 500.
	BatchSize int
	// PollInterval is the pause after a poll that found nothing. A wake-up ends the pause early. While
	// the store receives notifications of commits in all processes and no transport is paused, the
	// pause is five times as long, but at most five sixths of LeaseTTL. It is not extended for a minute
	// after a poll found messages without a wake-up. Default: 1 s.
	PollInterval time.Duration
	// LeaseTTL is the duration of a lane lease. A batch that takes longer than a quarter of LeaseTTL
	// renews its leases. If a relay is killed, its messages wait up to LeaseTTL for another relay. If a
	// relay cannot renew for that long, it loses its lanes, and its messages in flight are published
	// twice. Default: 6 s.
	LeaseTTL time.Duration
	// PublishTimeout is the time limit for publishing one batch. The relay sends during the first
	// half only, and releases the messages not sent by then. At the end it releases the unconfirmed
	// messages too, and treats their transport as unavailable. Default: 10 s.
	PublishTimeout time.Duration
	// ShutdownTimeout is the time limit for shutdown, from the end of Run's context to Run's return.
	// The last third of it, at most 5 s, is reserved for the store. Default: 15 s.
	ShutdownTimeout time.Duration

	// Retry is the retry policy of failed messages.
	Retry RetryPolicy
	// ByName overrides Retry by message name. A zero field keeps Retry's value.
	ByName map[string]RetryPolicy
	// MaxCrashes is the number of relays in a row that may be lost while this one message is all they
	// have in flight. Then the message becomes a dead letter of class "quarantined". A relay is lost
	// when it neither settles nor renews its lease within LeaseTTL. Default: 3.
	MaxCrashes int

	// Rand returns numbers from [0, 1) for jitter. It must be safe for concurrent use. Default: math/rand/v2.
	Rand func() float64
	// Logger receives at most one line in 10 s for each kind of fault, message name and class.
	// Default: slog.Default().
	Logger *slog.Logger
	// TracerProvider and MeterProvider default to the global ones.
	TracerProvider trace.TracerProvider
	MeterProvider  metric.MeterProvider
}

func (c RelayConfig) withDefaults() RelayConfig {
	c.BatchSize = cmp.Or(c.BatchSize, 500)
	c.PollInterval = cmp.Or(c.PollInterval, time.Second)
	c.LeaseTTL = cmp.Or(c.LeaseTTL, 6*time.Second)
	c.PublishTimeout = cmp.Or(c.PublishTimeout, 10*time.Second)
	c.ShutdownTimeout = cmp.Or(c.ShutdownTimeout, 15*time.Second)
	c.Retry = c.Retry.over(RetryPolicy{MaxAttempts: 10, BaseDelay: time.Second, MaxDelay: 5 * time.Minute})
	byName := make(map[string]RetryPolicy, len(c.ByName))
	for name, p := range c.ByName {
		byName[name] = p.over(c.Retry)
	}
	c.ByName = byName
	c.MaxCrashes = cmp.Or(c.MaxCrashes, 3)
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Rand == nil {
		c.Rand = rand.Float64
	}
	return c
}

func (c RelayConfig) validate() error {
	var errs []error
	refuse := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf("outbox: RelayConfig."+format, args...))
		}
	}
	for name, p := range c.Transports {
		refuse(name != "", `Transports has the name "", which is reserved for NewRelay's publisher`)
		refuse(p != nil, "Transports[%q] is nil", name)
	}
	refuse(c.BatchSize > 0 && c.BatchSize <= maxBatch, "BatchSize is %d, want 1 to %d", c.BatchSize, maxBatch)
	refuse(c.PollInterval > 0, "PollInterval is %v, want more than 0", c.PollInterval)
	refuse(c.LeaseTTL > 0, "LeaseTTL is %v, want more than 0", c.LeaseTTL)
	refuse(c.PublishTimeout > 0, "PublishTimeout is %v, want more than 0", c.PublishTimeout)
	refuse(c.ShutdownTimeout > 0, "ShutdownTimeout is %v, want more than 0", c.ShutdownTimeout)
	c.Retry.validate("Retry", refuse)
	for name, p := range c.ByName {
		err := driver.CheckName(name)
		refuse(err == nil, "ByName: %w", err)
		p.validate(fmt.Sprintf("ByName[%q]", name), refuse)
	}
	refuse(c.MaxCrashes > 0, "MaxCrashes is %d, want at least 1", c.MaxCrashes)
	return errors.Join(errs...)
}

// maxBatch limits the memory that one claim uses.
const maxBatch = 10_000

// storeTimeout is the time limit of each store call: 5 s, or less if the leases would expire during a
// call, or if a shutdown would have no time left for confirms.
func (c RelayConfig) storeTimeout() time.Duration {
	return min(5*time.Second, c.LeaseTTL*5/6, c.ShutdownTimeout/3)
}

// retry returns the policy for messages with the name.
func (c RelayConfig) retry(name string) RetryPolicy {
	if p, ok := c.ByName[name]; ok {
		return p
	}
	return c.Retry
}

// RetryPolicy sets the number of attempts and the delays between them. In RelayConfig.Retry, a
// zero field means its default.
type RetryPolicy struct {
	// MaxAttempts is the number of failed attempts after which a message becomes a dead letter. A
	// permanent failure makes it a dead letter immediately. Default: 10.
	MaxAttempts int
	// BaseDelay is the delay after the first failed attempt. It doubles with each further failure up to
	// MaxDelay, with a jitter of ±20 %. Default: 1 s.
	BaseDelay time.Duration
	// MaxDelay is the longest delay before jitter, at least BaseDelay. Default: 5 min.
	MaxDelay time.Duration
}

// over returns p with its zero fields taken from base.
func (p RetryPolicy) over(base RetryPolicy) RetryPolicy {
	p.MaxAttempts = cmp.Or(p.MaxAttempts, base.MaxAttempts)
	p.BaseDelay = cmp.Or(p.BaseDelay, base.BaseDelay)
	p.MaxDelay = cmp.Or(p.MaxDelay, base.MaxDelay)
	return p
}

// validate checks a policy without zero fields.
func (p RetryPolicy) validate(where string, refuse func(ok bool, format string, args ...any)) {
	refuse(p.MaxAttempts > 0, "%s.MaxAttempts is %d, want at least 1", where, p.MaxAttempts)
	refuse(p.BaseDelay > 0 && p.BaseDelay <= p.MaxDelay, "%s.BaseDelay is %v, want more than 0 and at most MaxDelay", where, p.BaseDelay)
}

// last reports whether attempt number n, which failed with class, was the last attempt.
func (p RetryPolicy) last(n int, class driver.Class) bool {
	return class == driver.Permanent || class == driver.Quarantined || n >= p.MaxAttempts
}

// delay returns the time from failed attempt n (from 1) to the next attempt; random is from [0, 1).
func (p RetryPolicy) delay(n int, random float64) time.Duration {
	return backoff.Policy{Base: p.BaseDelay, Max: p.MaxDelay, Jitter: 0.2}.Delay(n-1, random)
}
