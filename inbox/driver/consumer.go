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

// maxPrefetch is the largest window of a consumer: quorum queues allow no more.
const maxPrefetch = 2000

// maxCall bounds a call of the processor where no broker does: one message that hangs keeps the others
// of its batch for so long.
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

const (
	defaultMaxAttempts = 6
	defaultBaseDelay   = time.Second
	defaultMultiplier  = 2
	defaultMaxDelay    = 60 * time.Second
	defaultJitter      = 0.2
	defaultMaxAge      = 24 * time.Hour

	// minAfter is the shortest delay that an error may ask for, unless BaseDelay is shorter still: a message
	// must not come again hundreds of times a second.
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
	// Counted says that the next delivery's Attempt is one higher, and that
	// FirstFailedAt is to be set if it is zero.
	Counted bool
	// Recovered says that the next delivery's Recovered is one higher, too.
	Recovered bool
}

// Next decides over a message that failed at the time now. Random, from 0 up to but not
// including 1, selects the jitter. It is a pure function of its arguments and never waits.
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
	case delay == 0: // postponed: what the message failed at before does not matter
		delay = jittered(p, delayOf(p, 1), random)
	}
	return Decision{Action: ActionRetry, Delay: delay, Counted: f.Counted, Recovered: f.Counted && f.Unlimited}
}

// Horizon is the longest time between the first failure of a message and its last retry,
// apart from the time that it waits in its queue and in its handlers.
func Horizon(p inbox.RetryPolicy) time.Duration {
	p = RetryDefaults(p)
	var retries time.Duration
	for n := 1; n < p.MaxAttempts; n++ {
		retries += variant(p, delayOf(p, n), 2)
	}
	// A recoverable failure just before MaxAge may ask for as long a delay again.
	return max(retries, 2*p.MaxAge)
}

// delayOf is the delay before retry n = 1, 2, …, without jitter:
// BaseDelay × Multiplier^(n-1), at most MaxDelay, in whole milliseconds.
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

// variant is 1-Jitter, 1 or 1+Jitter times base for i = 0, 1, 2, at most MaxDelay.
func variant(p inbox.RetryPolicy, base time.Duration, i int) time.Duration {
	jitter := max(p.Jitter, 0)
	return min(wholeMillis(float64(base)*(1+jitter*float64(i-1))), p.MaxDelay)
}

// wholeMillis rounds to milliseconds, and to at least one.
func wholeMillis(d float64) time.Duration {
	return max(time.Duration(math.Round(d/float64(time.Millisecond))), 1) * time.Millisecond
}

// The classes of this SDK. Handlers add their own by inbox.Classed.
const (
	ClassDefault       = "default"            // failed too often
	ClassValidation    = base.ClassValidation // undecodable, unknown name, no valid id
	ClassUnrecoverable = "unrecoverable"      // the handler said so
	ClassQuarantined   = "quarantined"        // ends the process again and again; not run any more
)

// The limits of a message.
const (
	MaxNameBytes  = base.MaxNameBytes // AMQP allows no longer one either
	MaxBodyBytes  = base.MaxBodyBytes // RabbitMQ's own bound since 4.0
	MaxErrorBytes = 1024              // of the error text that a dead letter keeps
)

// ErrUnavailable is inside every error of inbox.Unavailable: a server that processing needs is
// down. Returned itself it means the same.
var ErrUnavailable = base.ErrUnavailable

// ValidClass reports whether a text can be a class: 1 to 64 of a-z, 0-9, dot, hyphen, underscore.
func ValidClass(class string) bool { return base.ValidClass(class) }

// NewContext returns a context from which inbox.FromContext takes the message in hand. An
// inbox.Mux makes one for its handlers; other processors call this.
func NewContext(ctx context.Context, m *inbox.Message) context.Context {
	return base.NewContext(ctx, m)
}

// Action is what becomes of a message that was not processed.
type Action int

// The actions.
const (
	// ActionRetry delivers the message again after a delay, other messages meanwhile.
	ActionRetry Action = iota + 1
	// ActionDead moves the message to the dead-letter queue of its class.
	ActionDead
	// ActionReturn gives the message back to its queue as it was.
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

// Failure is what Classify reads out of an error. Next turns it into a Decision.
type Failure struct {
	// Err is the error itself, or says that its methods panic.
	Err error
	// Class selects the dead-letter queue.
	Class string
	// Action is ActionRetry, which the policy may turn into ActionDead, ActionDead or ActionReturn.
	Action Action
	// After is the delay the error asks for; 0 leaves it to the policy.
	After time.Duration
	// Counted says that the failure is the message's own and raises its Attempt.
	Counted bool
	// Unlimited says that only the age bounds the retries, not their number.
	Unlimited bool
	// Unavailable says that a server is down, so that the consumer should pause.
	Unavailable bool
}

// Classify reads an error's markers.
//
// The outermost marker of a chain decides. Errors joined by errors.Join, or by several %w,
// are judged one by one: any unavailable or postponed one rules the whole; else any
// recoverable one makes it recoverable, with the longest delay asked for; else it is
// unrecoverable only when all are; else the default policy holds. The class is the first
// one named among those that decided; inbox.ErrDraining anywhere gives the message back.
// An unmarked error has ClassDefault and the default policy; so has one whose own methods
// panic, and Err then says so. For nil the zero Failure is returned.
func Classify(err error) (f Failure) {
	if err == nil {
		return Failure{}
	}
	defer func() {
		if v := recover(); v != nil {
			f = unmarked(fmt.Errorf("inbox: the methods of an error of type %T panic: %v", err, v))
		}
	}()
	// A nil pointer that a handler returned as an error must not end the consumer, neither
	// here nor where Err is written to a log.
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
