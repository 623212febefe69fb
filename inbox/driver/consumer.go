package driver

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
)

// maxPrefetch is the largest window of a consumer: quorum queues allow no more.
const maxPrefetch = 2000

// maxCall bounds a call of the processor where no broker does: one message that hangs keeps the others
// of its batch for so long.
const maxCall = 10 * time.Minute

const (
	maxConsumerName = 215
	maxPrefixBytes  = 128
)

// ConsumerDefaults returns a config with every zero field replaced by its default but for the
// providers of telemetry, whose nil means the global ones.
func ConsumerDefaults(c inbox.ConsumerConfig, queue string) inbox.ConsumerConfig {
	c.Name = cmp.Or(c.Name, queue)
	c.Concurrency = cmp.Or(c.Concurrency, 8)
	c.Batch = cmp.Or(c.Batch, 1)
	c.Prefetch = cmp.Or(c.Prefetch, min(2*c.Concurrency*c.Batch, maxPrefetch))
	c.HandlerTimeout = cmp.Or(c.HandlerTimeout, 60*time.Second)
	c.MaxCrashes = cmp.Or(c.MaxCrashes, 5)
	c.MaxParked = cmp.Or(c.MaxParked, 100_000)
	c.Retry = RetryDefaults(c.Retry)
	c.ShutdownTimeout = cmp.Or(c.ShutdownTimeout, 60*time.Second)
	if c.Rand == nil {
		c.Rand = rand.Float64
	}
	c.Logger = cmp.Or(c.Logger, slog.Default())
	return c
}

// CallTimeout returns how long the processor may take for n messages together: n times
// HandlerTimeout, but no more than a third of hold, the time for which a broker lets a delivery stay
// unsettled, or than 10 minutes where that has no end, which is a hold of 0.
func CallTimeout(c inbox.ConsumerConfig, hold time.Duration, n int) time.Duration {
	most := max(c.HandlerTimeout, cmp.Or(hold/3, maxCall))
	if c.HandlerTimeout > most/time.Duration(n) {
		return most
	}
	return time.Duration(n) * c.HandlerTimeout
}

// CheckConsumer returns every violation of a config that has its defaults in one error, naming
// the fields.
func CheckConsumer(c inbox.ConsumerConfig) error {
	var problems []error
	fail := func(format string, args ...any) {
		problems = append(problems, fmt.Errorf("inbox: ConsumerConfig."+format, args...))
	}
	if len(c.Name) > maxConsumerName {
		fail("Name has more than %d bytes", maxConsumerName)
	}
	if c.Concurrency < 1 || c.Concurrency > maxPrefetch {
		fail("Concurrency %d is not from 1 to %d", c.Concurrency, maxPrefetch)
	}
	if c.Batch < 1 || c.Batch > maxPrefetch {
		fail("Batch %d is not from 1 to %d", c.Batch, maxPrefetch)
	}
	if c.Prefetch < c.Concurrency || c.Prefetch > maxPrefetch {
		fail("Prefetch %d is not from Concurrency (%d) to %d", c.Prefetch, c.Concurrency, maxPrefetch)
	}
	if c.MaxCrashes < 1 {
		fail("MaxCrashes %d is negative", c.MaxCrashes)
	}
	if c.MaxParked < 1 {
		fail("MaxParked %d is negative", c.MaxParked)
	}
	if c.MessageLimit < 0 {
		fail("MessageLimit %d is negative", c.MessageLimit)
	}
	for _, d := range [...]struct {
		name  string
		value time.Duration
	}{{"HandlerTimeout", c.HandlerTimeout}, {"TimeLimit", c.TimeLimit}, {"ShutdownTimeout", c.ShutdownTimeout}} {
		if d.value < 0 {
			fail("%s %v is negative", d.name, d.value)
		}
	}
	if len(c.DeadLetterPrefix) > maxPrefixBytes {
		fail("DeadLetterPrefix has more than %d bytes", maxPrefixBytes)
	}
	for _, class := range c.Classes {
		if !ValidClass(class) {
			fail("Classes: %q is no valid class", class)
		}
	}
	return errors.Join(errors.Join(problems...), CheckRetry(c.Retry))
}

// Unworkable returns why a consumer must not run with a processor, naming the settings: its retries outlast what the
// processor remembers, or its settings name handlers that it has not. It asks no server.
func Unworkable(c inbox.ConsumerConfig, p inbox.Processor) error {
	var problems []error
	if d, ok := p.(Deduplicator); ok && d.Retention() > 0 && d.Retention() < Horizon(c.Retry) {
		problems = append(problems, fmt.Errorf("inbox: ConsumerConfig.Retry.MaxAge %v: a message may be retried for %v, "+
			"and the processor's Retention is %v: after that the message takes effect again", c.Retry.MaxAge, Horizon(c.Retry), d.Retention()))
	}
	if named, ok := p.(Configured); ok {
		problems = append(problems, named.Configured())
	}
	return errors.Join(problems...)
}

// AllClasses are the classes of this SDK and own, sorted, without repetition.
func AllClasses(own []string) []string {
	return Places(Traits{}, own)
}

// Places are the classes with a dead-letter queue of their own, sorted, without repetition.
func Places(t Traits, own []string) []string {
	all := append([]string{ClassDefault}, own...)
	if !t.FewPlaces {
		all = append(all, ClassValidation, ClassUnrecoverable, ClassQuarantined)
	}
	slices.Sort(all)
	return slices.Compact(all)
}
