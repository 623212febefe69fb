package outbox

import (
	"cmp"
	"maps"
	"time"

	"github.com/holdfast-go/holdfast/internal/backoff"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// Policy says how often and how late a failed message is tried again. In every field zero means the
// default.
type Policy struct {
	// MaxAttempts is after how many failed attempts a message becomes a dead letter. Default 10.
	MaxAttempts int
	// MaxAttemptsByClass overrides MaxAttempts for Retryable, Unroutable or Permanent
	// failures. Default: 1 for Permanent. An entry must be at least 1.
	MaxAttemptsByClass map[driver.Class]int
	// RetryDelay is the wait after the first failed attempt; it doubles with each further one up to
	// MaxRetryDelay, and is spread by ±20 %. Default 1 s.
	RetryDelay time.Duration
	// MaxRetryDelay is at least RetryDelay. Default 5 min.
	MaxRetryDelay time.Duration
}

// over returns p with the fields of base where it has none, and a map of its own.
func (p Policy) over(base Policy) Policy {
	p.MaxAttempts = cmp.Or(p.MaxAttempts, base.MaxAttempts)
	p.RetryDelay = cmp.Or(p.RetryDelay, base.RetryDelay)
	p.MaxRetryDelay = cmp.Or(p.MaxRetryDelay, base.MaxRetryDelay)
	if len(p.MaxAttemptsByClass) == 0 {
		p.MaxAttemptsByClass = base.MaxAttemptsByClass
	}
	p.MaxAttemptsByClass = maps.Clone(p.MaxAttemptsByClass)
	return p
}

// validate checks a policy without zero fields.
func (p Policy) validate(where string, refuse func(ok bool, format string, args ...any)) {
	refuse(p.MaxAttempts > 0, "%sMaxAttempts is %d, want at least 1", where, p.MaxAttempts)
	for class, n := range p.MaxAttemptsByClass {
		refuse(class == driver.Retryable || class == driver.Unroutable || class == driver.Permanent, "%sMaxAttemptsByClass: class %q costs no attempts", where, class)
		refuse(n > 0, "%sMaxAttemptsByClass[%s] is %d, want at least 1", where, class, n)
	}
	refuse(p.RetryDelay > 0 && p.RetryDelay <= p.MaxRetryDelay, "%sRetryDelay is %v, want more than 0 and at most MaxRetryDelay", where, p.RetryDelay)
}

// attempts is how many attempts a message has whose last failure was of class.
func (p Policy) attempts(class driver.Class) int {
	if n, ok := p.MaxAttemptsByClass[class]; ok {
		return n
	}
	if class == driver.Permanent {
		return 1
	}
	return p.MaxAttempts
}

// retryDelay is the wait before the next attempt, after attempt number n (from 1) failed; random is
// from [0, 1).
func (p Policy) retryDelay(n int, random float64) time.Duration {
	return backoff.Policy{Base: p.RetryDelay, Max: p.MaxRetryDelay, Jitter: 0.2}.Delay(n-1, random)
}
