package driver

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
)

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
