package ratelimit

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// Algorithm says how a Limit counts.
type Algorithm uint8

const (
	// SlidingWindow weighs two counters: this window's and, by the share of it that a window ending
	// now still covers, the one before. It is the default. A burst around a boundary may admit up to
	// 2 × Max - 1 within some window.
	SlidingWindow Algorithm = iota

	// TokenBucket holds Burst tokens and gains Max of them per Window, evenly. It is GCRA by another
	// name: a bucket of Burst 1 spaces its units evenly.
	TokenBucket

	// FixedWindow counts this window alone, as quotas per hour or day are sold. A burst around a
	// boundary may admit 2 × Max within some window.
	FixedWindow
)

// Limit is how much of something is allowed. A value is ready for use; every call checks it, as
// Validate does.
type Limit struct {
	// Name is the name of the limit in keys, headers and decisions: 1 to 32 of [a-z0-9_-]. Required.
	// Limits of one name and one Window count together, whatever their Max: a new plan takes effect
	// at once and forgets nothing.
	Name string
	// Max is the number of units per Window, at least 1. Required.
	Max int64
	// Window is the time that Max is for: whole milliseconds, from 1 s to 366 days. Default: 1 minute.
	Window time.Duration
	// Algorithm says how to count. Default: SlidingWindow.
	Algorithm Algorithm
	// Burst is the size of a token bucket; other algorithms refuse it. Default: Max.
	Burst int64
}

const (
	minWindow  = time.Second
	maxWindow  = 366 * 24 * time.Hour
	maxName    = 32
	exactFloat = 1 << 53 // Redis scripts count in doubles, which are exact below this
)

// Validate reports everything that is wrong with the limit, wrapping ErrInvalid.
func (l Limit) Validate() error {
	l = l.withDefaults()
	var errs []error
	fail := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("%w: limit %.40q: "+format, append([]any{ErrInvalid, l.Name}, args...)...))
	}
	if !validName(l.Name) {
		fail("Name must be 1 to %d of [a-z0-9_-]", maxName)
	}
	if l.Max < 1 {
		fail("Max is %d, must be at least 1", l.Max)
	}
	if l.Window < minWindow || l.Window > maxWindow || l.Window%time.Millisecond != 0 {
		fail("Window is %v, must be whole milliseconds from %v to %v", l.Window, minWindow, maxWindow)
	}
	switch {
	case l.Algorithm > FixedWindow:
		fail("Algorithm %d is unknown", l.Algorithm)
	case l.Algorithm != TokenBucket && l.Burst != 0:
		fail("Burst is for a token bucket")
	case l.Burst < 0:
		fail("Burst is %d, must not be negative", l.Burst)
	}
	if len(errs) == 0 && !l.exact() {
		fail("Max %d and Burst %d over %v are too large to count exactly", l.Max, l.Burst, l.Window)
	}
	return errors.Join(errs...)
}

// exact reports whether all that is computed with the limit stays an exact integer in a double: four
// times Max, or Burst, in units of a window.
func (l Limit) exact() bool {
	return max(l.Max, l.Burst) <= math.MaxInt64/4/l.windowMS() &&
		4*max(l.Max, l.Burst)*l.windowMS() < exactFloat
}

func (l Limit) withDefaults() Limit {
	if l.Window == 0 {
		l.Window = time.Minute
	}
	if l.Algorithm == TokenBucket && l.Burst == 0 {
		l.Burst = l.Max
	}
	return l
}

func (l Limit) windowMS() int64 { return l.Window.Milliseconds() }

func validName(name string) bool {
	if len(name) == 0 || len(name) > maxName {
		return false
	}
	for i := range len(name) {
		c := name[i]
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '_' && c != '-' {
			return false
		}
	}
	return true
}
