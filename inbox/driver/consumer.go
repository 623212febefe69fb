package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/internal/base"
)

// maxPrefetch is the largest prefetch of a consumer: quorum queues allow no more.
const maxPrefetch = 2000

// maxCall bounds a call of the processor if the broker has no ack timeout. A message that hangs delays the
// others of its batch for this long.
const maxCall = 10 * time.Minute

const (
	maxConsumerName = 215
	maxPrefixBytes  = 128
)

// Named is an optional interface of an inbox.Processor, such as *inboxpgx.Store.
type Named interface {
	// Name returns the name of the consumer whose messages the processor gets.
	Name() string
}

// Names returns the names of a consumer and of its queue. The consumer's name is ConsumerConfig.Name, the processor's
// name, or the queue's name, the first that is set. The default of the queue's name is the consumer's.
func Names(c inbox.ConsumerConfig, p inbox.Processor, queue string) (consumer, from string) {
	consumer = c.Name
	if named, ok := p.(Named); ok {
		consumer = cmp.Or(consumer, named.Name())
	}
	consumer = cmp.Or(consumer, queue)
	return consumer, cmp.Or(queue, consumer)
}

// ConsumerDefaults returns a config with every zero field replaced by its default, except the telemetry
// providers. A nil provider means the global one.
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

// CallTimeout returns the time limit for processing n messages together. It is n times HandlerTimeout, at
// most a third of hold. Hold is the broker's ack timeout, the time for which a delivery may stay unsettled; 0
// means none, and then the limit is 10 minutes.
func CallTimeout(c inbox.ConsumerConfig, hold time.Duration, n int) time.Duration {
	most := max(c.HandlerTimeout, cmp.Or(hold/3, maxCall))
	if c.HandlerTimeout > most/time.Duration(n) {
		return most
	}
	return time.Duration(n) * c.HandlerTimeout
}

// CheckConsumer returns every violation of a config in one error, with the names of the fields. The config
// must have its defaults.
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
			fail("Classes: %q is not a class", class)
		}
	}
	return errors.Join(errors.Join(problems...), CheckRetry(c.Retry))
}

// Unworkable returns an error if a consumer must not run with a processor: its retries outlast the
// processor's retention, or the processor's settings name handlers that are not registered. It asks no
// server.
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

// AllClasses returns the SDK's classes and own, sorted, without duplicates.
func AllClasses(own []string) []string {
	return Places(Traits{}, own)
}

// Places returns the classes with a dead-letter queue of their own, sorted, without duplicates.
func Places(t Traits, own []string) []string {
	all := append([]string{ClassDefault}, own...)
	if !t.FewPlaces {
		all = append(all, ClassValidation, ClassUnrecoverable, ClassQuarantined)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

const (
	defaultMaxAttempts = 6
	defaultBaseDelay   = time.Second
	defaultMultiplier  = 2
	defaultMaxDelay    = 60 * time.Second
	defaultJitter      = 0.2
	defaultMaxAge      = 24 * time.Hour

	// minAfter is the shortest delay that an error may ask for, unless BaseDelay is shorter. It keeps a
	// message from being redelivered hundreds of times a second.
	minAfter = 100 * time.Millisecond
)

// RetryDefaults returns the policy with every zero field replaced by its default.
func RetryDefaults(p inbox.RetryPolicy) inbox.RetryPolicy {
	p.MaxAttempts = cmp.Or(p.MaxAttempts, defaultMaxAttempts)
	p.BaseDelay = cmp.Or(p.BaseDelay, defaultBaseDelay)
	p.MaxDelay = cmp.Or(p.MaxDelay, max(defaultMaxDelay, p.BaseDelay))
	p.Multiplier = cmp.Or(p.Multiplier, defaultMultiplier)
	p.Jitter = cmp.Or(p.Jitter, defaultJitter)
	p.MaxAge = cmp.Or(p.MaxAge, defaultMaxAge)
	return p
}

// CheckRetry returns every violation of a policy in one error, naming the fields.
func CheckRetry(p inbox.RetryPolicy) error {
	p = RetryDefaults(p)
	var problems []error
	fail := func(format string, args ...any) {
		problems = append(problems, fmt.Errorf("inbox: RetryPolicy."+format, args...))
	}
	if p.MaxAttempts < 0 {
		fail("MaxAttempts %d is negative", p.MaxAttempts)
	}
	if p.BaseDelay < time.Millisecond {
		fail("BaseDelay %v is shorter than 1ms", p.BaseDelay)
	}
	if p.MaxDelay < p.BaseDelay {
		fail("MaxDelay %v is shorter than BaseDelay %v", p.MaxDelay, p.BaseDelay)
	}
	if !(p.Multiplier >= 1) || math.IsInf(p.Multiplier, 0) {
		fail("Multiplier %v is not a number of at least 1", p.Multiplier)
	}
	if !(p.Jitter < 1) {
		fail("Jitter %v is not less than 1", p.Jitter)
	}
	if p.MaxAge < 0 {
		fail("MaxAge %v is negative", p.MaxAge)
	}
	return errors.Join(problems...)
}

// Decision is what happens to a message now.
type Decision struct {
	Action Action
	// Delay is how long ActionRetry waits, at most MaxAge.
	Delay time.Duration
	// Counted means that the next delivery's Attempt is one higher, and that FirstFailedAt is set if it is
	// zero.
	Counted bool
	// Recovered means that the next delivery's Recovered is also one higher.
	Recovered bool
}

// Next decides about a message that failed at the time now. Random, in [0, 1), selects the jitter. Next
// depends only on its arguments and never waits.
func Next(p inbox.RetryPolicy, m *inbox.Message, f Failure, now time.Time, random float64) Decision {
	p = RetryDefaults(p)
	attempt := max(m.Attempt, 1)
	switch {
	case f.Action != ActionRetry:
		return Decision{Action: f.Action, Counted: f.Counted}
	case f.Counted && f.Unlimited && !m.FirstFailedAt.IsZero() && now.Sub(m.FirstFailedAt) > p.MaxAge:
		return Decision{Action: ActionDead, Counted: true}
	case !f.Unlimited && attempt-m.Recovered >= p.MaxAttempts:
		return Decision{Action: ActionDead, Counted: f.Counted}
	}
	delay := min(f.After, p.MaxAge)
	if delay > 0 {
		delay = max(delay, min(minAfter, p.BaseDelay))
	}
	switch {
	case delay == 0 && f.Counted:
		delay = jittered(p, delayOf(p, attempt), random)
	case delay == 0: // postponed: earlier failures of the message do not matter
		delay = jittered(p, delayOf(p, 1), random)
	}
	return Decision{Action: ActionRetry, Delay: delay, Counted: f.Counted, Recovered: f.Counted && f.Unlimited}
}

// Horizon returns the longest time between the first failure of a message and its last retry. The time in the
// queue and in handlers is not included.
func Horizon(p inbox.RetryPolicy) time.Duration {
	p = RetryDefaults(p)
	var retries time.Duration
	for n := 1; n < p.MaxAttempts; n++ {
		retries += variant(p, delayOf(p, n), 2)
	}
	// A recoverable failure just before MaxAge may ask for another delay of up to MaxAge.
	return max(retries, 2*p.MaxAge)
}

// delayOf returns the delay before retry n = 1, 2, …, without jitter: BaseDelay × Multiplier^(n-1), at most
// MaxDelay, in whole milliseconds.
func delayOf(p inbox.RetryPolicy, n int) time.Duration {
	d := float64(p.BaseDelay) * math.Pow(p.Multiplier, float64(n-1))
	if d >= float64(p.MaxDelay) {
		return p.MaxDelay
	}
	return wholeMillis(d)
}

func jittered(p inbox.RetryPolicy, base time.Duration, random float64) time.Duration {
	return variant(p, base, min(max(int(random*3), 0), 2))
}

// variant returns 1-Jitter, 1 or 1+Jitter times base for i = 0, 1, 2, at most MaxDelay.
func variant(p inbox.RetryPolicy, base time.Duration, i int) time.Duration {
	jitter := max(p.Jitter, 0)
	return min(wholeMillis(float64(base)*(1+jitter*float64(i-1))), p.MaxDelay)
}

// wholeMillis rounds to milliseconds, at least one.
func wholeMillis(d float64) time.Duration {
	return max(time.Duration(math.Round(d/float64(time.Millisecond))), 1) * time.Millisecond
}

// The classes of this SDK. Handlers add their own by inbox.Classed.
const (
	ClassDefault       = "default"            // failed too often
	ClassValidation    = base.ClassValidation // undecodable, unknown name, no valid id
	ClassUnrecoverable = "unrecoverable"      // marked by the handler
	ClassQuarantined   = "quarantined"        // ended the process several times; not run any more
)

// The limits of a message.
const (
	MaxNameBytes  = base.MaxNameBytes // the limit of AMQP
	MaxBodyBytes  = base.MaxBodyBytes // the default limit of RabbitMQ 4.0
	MaxErrorBytes = 1024              // of the error text in a dead letter
)

// ErrUnavailable is inside every error of inbox.Unavailable: a server that processing needs is down. A
// handler may also return ErrUnavailable itself, with the same effect.
var ErrUnavailable = base.ErrUnavailable

// ValidClass reports whether a text can be a class: 1 to 64 of a-z, 0-9, dot, hyphen, underscore.
func ValidClass(class string) bool { return base.ValidClass(class) }

// NewContext returns a context from which inbox.FromContext takes the message. An inbox.Mux calls it for its
// handlers; other processors call it themselves.
func NewContext(ctx context.Context, m *inbox.Message) context.Context {
	return base.NewContext(ctx, m)
}

// Action is the next step for a message that failed.
type Action int

// The actions.
const (
	// ActionRetry delivers the message again after a delay. Other messages continue meanwhile.
	ActionRetry Action = iota + 1
	// ActionDead moves the message to the dead-letter queue of its class.
	ActionDead
	// ActionReturn requeues the message unchanged.
	ActionReturn
)

// String returns the action's name.
func (a Action) String() string {
	switch a {
	case ActionRetry:
		return "retry"
	case ActionDead:
		return "dead"
	case ActionReturn:
		return "return"
	default:
		return "none"
	}
}

// Failure is the result of Classify. Next turns it into a Decision.
type Failure struct {
	// Err is the error itself, or reports that the error's methods panic.
	Err error
	// Class selects the dead-letter queue.
	Class string
	// Action is ActionRetry, ActionDead or ActionReturn. The policy may turn ActionRetry into ActionDead.
	Action Action
	// After is the delay that the error asks for; 0 means the delay of the policy.
	After time.Duration
	// Counted means that the failure is the message's own and increments its Attempt.
	Counted bool
	// Unlimited means that the age bounds the retries, not their number.
	Unlimited bool
	// Unavailable means that a server is down, so that the consumer should pause.
	Unavailable bool
}

// Classify reads the markers of an error.
//
// The outermost marker of a chain decides. Errors joined by errors.Join, or by several %w, are judged one by
// one. If one of them is unavailable or postponed, so is the whole error. Else, if one is recoverable, the
// whole error is recoverable, with the longest delay of all. Else it is unrecoverable if all of them are.
// Otherwise the default policy applies. The class is the first one named by the errors that decided.
// inbox.ErrDraining anywhere in the chain requeues the message.
//
// An unmarked error has ClassDefault and the default policy. If the error's own methods panic, Err reports
// that, and the default policy applies. For nil, Classify returns the zero Failure.
func Classify(err error) (f Failure) {
	if err == nil {
		return Failure{}
	}
	defer func() {
		if v := recover(); v != nil {
			f = unmarked(fmt.Errorf("inbox: the methods of the error of type %T panicked: %v", err, v))
		}
	}()
	// A nil pointer returned as an error must not end the consumer, neither here nor when Err is logged.
	_ = err.Error()
	f = unmarked(err)
	if errors.Is(err, inbox.ErrDraining) {
		f.Action, f.Counted = ActionReturn, false
		return f
	}
	v := base.Judge(err)
	f.After = v.After
	switch v.Kind {
	case base.Unavailable:
		f.Action, f.Counted, f.Unavailable = ActionReturn, false, true
	case base.Postponed:
		f.Counted, f.Unlimited = false, true
	case base.Recoverable:
		f.Unlimited = true
	case base.Unrecoverable:
		f.Action, f.Class = ActionDead, ClassUnrecoverable
	}
	if v.Class != "" {
		f.Class = v.Class
	}
	return f
}

func unmarked(err error) Failure {
	return Failure{Err: err, Class: ClassDefault, Action: ActionRetry, Counted: true}
}
