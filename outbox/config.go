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
	// Transports are further publishers by the name in Message.Transport. The name "" is that of
	// NewRelay's publisher. Optional.
	Transports map[string]driver.Publisher

	// BatchSize is the most messages claimed at once, at most 10,000; up to three batches are in hand.
	// Default: 500.
	BatchSize int
	// PollInterval is the pause after a look that found nothing. A commit that the store reports cuts
	// it short. It is five times as long, but no longer than five sixths of LeaseTTL, while the store hears
	// of commits in all processes and no transport is paused, unless a look has found messages within
	// the last minute that no wake-up announced. Default: 1 s.
	PollInterval time.Duration
	// LeaseTTL is how long lanes are leased; a batch that takes longer than a quarter of it renews its
	// leases. It is also how long the messages of a relay that was killed wait for another one. A relay
	// that cannot renew for so long loses its lanes, and what it has in hand is published twice.
	// Default: 6 s.
	LeaseTTL time.Duration
	// PublishTimeout bounds the publishing of one batch. Its first half is for sending; what was
	// not sent by then is given back. What is not confirmed at its end is given back too, and its
	// transport counts as unavailable. Default: 10 s.
	PublishTimeout time.Duration
	// ShutdownTimeout bounds the time from the end of Run's context to Run's return. The last third of
	// it, 5 s at most, is for the store. Default: 15 s.
	ShutdownTimeout time.Duration

	// Retry says what becomes of messages that fail.
	Retry RetryPolicy
	// ByName overrides Retry by message name: each field that is not zero replaces Retry's.
	ByName map[string]RetryPolicy
	// MaxCrashes is how many relays in a row may be lost that have one message in hand, and nothing
	// else, until the message becomes a dead letter of class "quarantined". A relay is lost when it
	// neither settles nor renews its lease within LeaseTTL. Default: 3.
	MaxCrashes int

	// Rand returns numbers from [0, 1) for jitter. Several goroutines call it. Default: math/rand/v2.
	Rand func() float64
	// Logger gets one line in 10 s for each kind of fault, message name and class. Default:
	// slog.Default().
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
		refuse(name != "", `Transports has the name "", which is that of NewRelay's publisher`)
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

// maxBatch bounds what one claim holds in memory.
const maxBatch = 10_000

// storeTimeout bounds each call of the store: 5 s, or less where the leases would run out during a
// call, or where a shutdown would have no time left for confirms.
func (c RelayConfig) storeTimeout() time.Duration {
	return min(5*time.Second, c.LeaseTTL*5/6, c.ShutdownTimeout/3)
}

// retry is the policy for the messages with the name.
func (c RelayConfig) retry(name string) RetryPolicy {
	if p, ok := c.ByName[name]; ok {
		return p
	}
	return c.Retry
}

// RetryPolicy says how often and how late a failed message is tried again.
type RetryPolicy struct {
	// MaxAttempts is after how many failed attempts a message becomes a dead letter. A permanent
	// failure makes it one at once. Default: 10.
	MaxAttempts int
	// BaseDelay is the wait after the first failed attempt. It doubles with each further one up to
	// MaxDelay, and is spread by ±20 %. Default: 1 s.
	BaseDelay time.Duration
	// MaxDelay is at least BaseDelay. Default: 5 min.
	MaxDelay time.Duration
}

// over returns p with the fields of base where it has none.
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

// last reports whether attempt number n, which failed with class, is the last one.
func (p RetryPolicy) last(n int, class driver.Class) bool {
	return class == driver.Permanent || class == driver.Quarantined || n >= p.MaxAttempts
}

// delay is the wait before the next attempt, after attempt number n (from 1) failed; random is from
// [0, 1).
func (p RetryPolicy) delay(n int, random float64) time.Duration {
	return backoff.Policy{Base: p.BaseDelay, Max: p.MaxDelay, Jitter: 0.2}.Delay(n-1, random)
}
