package outbox

import (
	"cmp"
	"context"
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

// RelayConfig tunes a Relay. The zero value works; in every field zero means the default.
type RelayConfig struct {
	// BatchSize is the most messages taken at once; up to three batches are in hand. Default 500.
	BatchSize int
	// PollInterval is the pause after a look that found nothing; Wake cuts it short. Default 1 s.
	PollInterval time.Duration

	// LeaseTTL is for how long lanes are taken; a batch that takes longer than a quarter of it renews
	// its leases. It is the time that messages of a relay that was killed wait for another one. A
	// relay that does not get to renew for so long, frozen or cut off, loses its lanes, and what it
	// has in hand is published twice. At least StoreTimeout. Default 6 s.
	LeaseTTL time.Duration
	// PublishTimeout bounds the publishing of one batch. Its first half is for sending; what was
	// not sent by then is given back. What is not confirmed at its end is given back too, and its
	// transport counts as unavailable. Default 10 s.
	PublishTimeout time.Duration
	// StoreTimeout bounds each call of the Source. Default 5 s.
	StoreTimeout time.Duration
	// ShutdownTimeout bounds the time from the end of Run's context to Run's return, more than
	// StoreTimeout. Default 15 s.
	ShutdownTimeout time.Duration

	// Policy is what becomes of messages that fail.
	Policy
	// ByName overrides Policy by message name: each field that is not zero takes the place of the
	// Policy's. The Permanent failures of a name have one attempt as well, unless a
	// MaxAttemptsByClass says something else.
	ByName map[string]Policy

	// MaxCrashes is how often in a row a relay may be lost that has one message in hand, and nothing
	// else, until the message becomes a Quarantined dead letter. Lost means that it neither settled
	// nor renewed its lease within LeaseTTL. Default 3.
	MaxCrashes int

	// PauseDelay is for how long a transport (or a store) that is unavailable is left alone; it
	// doubles with each further failure up to MaxPauseDelay, and is spread by ±50 %. A transport
	// whose Publisher is Reconnecting is tried at once when that is ready. Default 200 ms.
	PauseDelay time.Duration
	// MaxPauseDelay is at least PauseDelay. A pause outlives the fault that has caused it, so it is
	// short. Default 2 s.
	MaxPauseDelay time.Duration

	// Logger gets one line in 10 s for each kind of fault, message name and class. Nil means
	// slog.Default().
	Logger *slog.Logger
	// TracerProvider and MeterProvider nil mean the global ones.
	TracerProvider trace.TracerProvider
	MeterProvider  metric.MeterProvider
	Hooks          Hooks
	// Rand returns numbers from [0, 1) for jitter, and is called from several goroutines. Default
	// math/rand/v2.
	Rand func() float64
}

// Hooks are optional callbacks for observation. They run on the relay's goroutines, one at
// a time, after the outcome was stored, and should return quickly.
type Hooks struct {
	// OnPublished is called for every message that was confirmed.
	OnPublished func(ctx context.Context, m driver.Message)
	// OnFailed is called for every attempt that failed.
	OnFailed func(ctx context.Context, m driver.Message, f Failure)
	// OnPause is called when a transport is found unavailable or blocked.
	OnPause func(ctx context.Context, transport string, err error)
}

// Failure describes a failed attempt to publish.
type Failure struct {
	Class   driver.Class
	Err     error
	Attempt int           // its number, from 1
	Dead    bool          // it was the last one: the message is a dead letter now
	Delay   time.Duration // until the next one, if not Dead
}

func (c RelayConfig) withDefaults() RelayConfig {
	c.BatchSize = cmp.Or(c.BatchSize, 500)
	c.PollInterval = cmp.Or(c.PollInterval, time.Second)
	c.LeaseTTL = cmp.Or(c.LeaseTTL, 6*time.Second)
	c.PublishTimeout = cmp.Or(c.PublishTimeout, 10*time.Second)
	c.StoreTimeout = cmp.Or(c.StoreTimeout, 5*time.Second)
	c.ShutdownTimeout = cmp.Or(c.ShutdownTimeout, 15*time.Second)
	c.Policy = c.Policy.over(Policy{MaxAttempts: 10, RetryDelay: time.Second, MaxRetryDelay: 5 * time.Minute})
	byName := make(map[string]Policy, len(c.ByName))
	for name, p := range c.ByName {
		byName[name] = p.over(c.Policy)
	}
	c.ByName = byName
	c.MaxCrashes = cmp.Or(c.MaxCrashes, 3)
	c.PauseDelay = cmp.Or(c.PauseDelay, 200*time.Millisecond)
	c.MaxPauseDelay = cmp.Or(c.MaxPauseDelay, 2*time.Second)
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
	refuse(c.BatchSize > 0 && c.BatchSize <= maxBatch, "BatchSize is %d, want 1 to %d", c.BatchSize, maxBatch)
	refuse(c.PollInterval > 0, "PollInterval is %v, want more than 0", c.PollInterval)
	refuse(c.PublishTimeout > 0, "PublishTimeout is %v, want more than 0", c.PublishTimeout)
	refuse(c.StoreTimeout > 0, "StoreTimeout is %v, want more than 0", c.StoreTimeout)
	refuse(c.LeaseTTL >= c.StoreTimeout, "LeaseTTL is %v, want at least StoreTimeout", c.LeaseTTL)
	refuse(c.ShutdownTimeout > c.StoreTimeout, "ShutdownTimeout is %v, want more than StoreTimeout", c.ShutdownTimeout)
	c.Policy.validate("", refuse)
	for name, p := range c.ByName {
		err := driver.CheckName(name)
		refuse(err == nil, "ByName: %w", err)
		p.validate(fmt.Sprintf("ByName[%q].", name), refuse)
	}
	refuse(c.MaxCrashes > 0, "MaxCrashes is %d, want at least 1", c.MaxCrashes)
	refuse(c.PauseDelay > 0 && c.PauseDelay <= c.MaxPauseDelay, "PauseDelay is %v, want more than 0 and at most MaxPauseDelay", c.PauseDelay)
	return errors.Join(errs...)
}

// maxBatch bounds what one claim holds in memory.
const maxBatch = 10_000

// policy is that of the messages with the name.
func (c RelayConfig) policy(name string) Policy {
	if p, ok := c.ByName[name]; ok {
		return p
	}
	return c.Policy
}

// pauseDelay is how long something unavailable is left alone after its failure number n, from 1.
func (c RelayConfig) pauseDelay(n int) time.Duration {
	return backoff.Policy{Base: c.PauseDelay, Max: c.MaxPauseDelay, Jitter: 0.5}.Delay(n-1, c.Rand())
}
