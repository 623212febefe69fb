package outbox

import (
	"cmp"
	"time"

	"github.com/holdfast-go/holdfast/internal/backoff"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

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
