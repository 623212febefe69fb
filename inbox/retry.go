package inbox

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"
)

const (
	defaultMaxRetries = 5
	defaultDelay      = time.Second
	defaultMultiplier = 2
	defaultMaxDelay   = 60 * time.Second
	defaultJitter     = 0.2
	defaultMaxAge     = 24 * time.Hour

	maxSteps = 20
)

// RetryPolicy says how often and how late a failed message is tried again. The zero value
// is 5 retries after 1, 2, 4, 8 and 16 seconds, each ±20 %.
//
// Delays are fixed, so that a broker can keep one queue for each: see Steps.
type RetryPolicy struct {
	// MaxRetries bounds the retries of failures that are neither recoverable nor
	// unrecoverable. 0 means 5, a negative number none.
	MaxRetries int
	// Delay is the delay before the first retry; at least 1 ms. 0 means 1 s.
	Delay time.Duration
	// Multiplier is the growth of the delay from retry to retry; at least 1. 0 means 2.
	Multiplier float64
	// MaxDelay bounds every delay, jitter included. 0 means 60 s.
	MaxDelay time.Duration
	// Jitter spreads a delay over 1-Jitter, 1 and 1+Jitter times itself; less than 1.
	// 0 means 0.2, a negative number no jitter.
	Jitter float64
	// MaxAge bounds the retries of recoverable failures: a message whose first failure
	// is longer ago is dead. It must stay below the retention of the dedup entries. 0 means 24 h.
	MaxAge time.Duration
}

// WithDefaults returns the policy with every zero field replaced by its default.
func (p RetryPolicy) WithDefaults() RetryPolicy {
	if p.MaxRetries == 0 {
		p.MaxRetries = defaultMaxRetries
	}
	if p.Delay == 0 {
		p.Delay = defaultDelay
	}
	if p.Multiplier == 0 {
		p.Multiplier = defaultMultiplier
	}
	if p.MaxDelay == 0 {
		p.MaxDelay = max(defaultMaxDelay, p.Delay)
	}
	if p.Jitter == 0 {
		p.Jitter = defaultJitter
	}
	if p.MaxAge == 0 {
		p.MaxAge = defaultMaxAge
	}
	return p
}

// Validate returns every violation in one error, naming the fields.
func (p RetryPolicy) Validate() error {
	p = p.WithDefaults()
	var problems []error
	fail := func(format string, args ...any) {
		problems = append(problems, fmt.Errorf("inbox: RetryPolicy."+format, args...))
	}
	if p.Delay < time.Millisecond {
		fail("Delay %v is shorter than 1ms", p.Delay)
	}
	if p.MaxDelay < p.Delay {
		fail("MaxDelay %v is shorter than Delay %v", p.MaxDelay, p.Delay)
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
	if len(problems) == 0 && len(p.bases()) > maxSteps {
		fail("Multiplier %v makes more than %d steps from Delay %v to MaxDelay %v", p.Multiplier, maxSteps, p.Delay, p.MaxDelay)
	}
	return errors.Join(problems...)
}

// Decision is what happens to a message now.
type Decision struct {
	Action Action
	// Delay is how long ActionRetry waits: one of Steps, or what the error asked for,
	// at most MaxAge.
	Delay time.Duration
	// Counted says that the next delivery's Attempt is one higher, and that
	// FirstFailedAt is to be set if it is zero.
	Counted bool
	// Recovered says that the next delivery's Recovered is one higher, too.
	Recovered bool
}

// Next decides over a message that failed at the time now. Random, from 0 up to but not
// including 1, selects the jitter. It is a pure function of its arguments and never waits.
func (p RetryPolicy) Next(m *Message, f Failure, now time.Time, random float64) Decision {
	p = p.WithDefaults()
	attempt := max(m.Attempt, 1)
	switch {
	case f.Action != ActionRetry:
		return Decision{Action: f.Action, Counted: f.Counted}
	case f.Counted && f.Unlimited && !m.FirstFailedAt.IsZero() && now.Sub(m.FirstFailedAt) > p.MaxAge:
		return Decision{Action: ActionDead, Counted: true}
	case !f.Unlimited && attempt-m.Recovered > p.MaxRetries:
		return Decision{Action: ActionDead, Counted: f.Counted}
	}
	delay := min(f.After, p.MaxAge)
	switch {
	case delay == 0 && f.Counted:
		delay = p.jittered(p.base(attempt), random)
	case delay == 0: // postponed: what the message failed at before does not matter
		delay = p.jittered(p.base(1), random)
	}
	return Decision{Action: ActionRetry, Delay: delay, Counted: f.Counted, Recovered: f.Counted && f.Unlimited}
}

// Horizon is the longest time between the first failure of a message and its last retry,
// apart from the time that it waits in its queue and in its handlers.
func (p RetryPolicy) Horizon() time.Duration {
	p = p.WithDefaults()
	var retries time.Duration
	for n := 1; n <= p.MaxRetries; n++ {
		retries += p.variant(p.base(n), 2)
	}
	// A recoverable failure just before MaxAge may ask for as long a delay again.
	return max(retries, 2*p.MaxAge)
}

// Steps returns every delay that Next takes of itself, ascending, without repetition:
// each step of the back-off up to MaxDelay, in up to three variants for the jitter.
func (p RetryPolicy) Steps() []time.Duration {
	p = p.WithDefaults()
	var steps []time.Duration
	for _, base := range p.bases() {
		for i := range 3 {
			steps = append(steps, p.variant(base, i))
		}
	}
	slices.Sort(steps)
	return slices.Compact(steps)
}

// Cover returns the step that a broker with only these fixed delays waits for a delay of
// d: the shortest one of at least d, or the longest there is, with what is left to wait
// after it.
func (p RetryPolicy) Cover(d time.Duration) (step, rest time.Duration) {
	steps := p.Steps()
	i, _ := slices.BinarySearch(steps, d)
	if i < len(steps) {
		return steps[i], 0
	}
	longest := steps[len(steps)-1]
	return longest, d - longest
}

// base is the delay before retry n = 1, 2, …, without jitter:
// Delay × Multiplier^(n-1), at most MaxDelay, in whole milliseconds.
func (p RetryPolicy) base(n int) time.Duration {
	d := float64(p.Delay) * math.Pow(p.Multiplier, float64(n-1))
	if d >= float64(p.MaxDelay) {
		return p.MaxDelay
	}
	return wholeMillis(d)
}

// bases are the distinct delays without jitter, at most maxSteps + 1 of them.
func (p RetryPolicy) bases() []time.Duration {
	bases := []time.Duration{p.base(1)}
	for n := 2; p.Multiplier > 1 && bases[len(bases)-1] < p.MaxDelay && len(bases) <= maxSteps; n++ {
		bases = append(bases, p.base(n))
	}
	return bases
}

func (p RetryPolicy) jittered(base time.Duration, random float64) time.Duration {
	return p.variant(base, min(max(int(random*3), 0), 2))
}

// variant is 1-Jitter, 1 or 1+Jitter times base for i = 0, 1, 2, at most MaxDelay.
func (p RetryPolicy) variant(base time.Duration, i int) time.Duration {
	jitter := max(p.Jitter, 0)
	return min(wholeMillis(float64(base)*(1+jitter*float64(i-1))), p.MaxDelay)
}

// wholeMillis rounds to milliseconds, the unit of a queue's time to live, and to at least one.
func wholeMillis(d float64) time.Duration {
	return max(time.Duration(math.Round(d/float64(time.Millisecond))), 1) * time.Millisecond
}
