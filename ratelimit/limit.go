package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/holdfast-go/holdfast/internal/check"
)

// Algorithm says how a Limit counts.
type Algorithm uint8

const (
	// SlidingWindow weighs two counters: this window's and, by the share of it
	// that a window ending now still covers, the one before. It is the default. A
	// burst around a boundary may admit up to 2 × Max - 1 within some window.
	SlidingWindow Algorithm = iota

	// TokenBucket holds Burst tokens and gains Max of them per Window, evenly.
	TokenBucket
)

// Limit is how much of something is allowed. A value is ready for use; Validate
// says whether it makes sense, and every call checks it.
type Limit struct {
	// Name is the name of the limit in keys, headers and decisions: 1 to 32 of
	// [a-z0-9_-]. A name stands for one Limit: two limits of one name count
	// together.
	Name string
	// Max is the number of units per Window, at least 1.
	Max int64
	// Window is the time that Max is for: whole milliseconds, from 1 s to 366
	// days. 0 means one minute.
	Window time.Duration
	// Algorithm says how to count. The zero value is SlidingWindow.
	Algorithm Algorithm
	// Burst is the size of a token bucket. 0 means Max. Other algorithms refuse
	// it.
	Burst int64
}

// Charge is what one request takes of one limit.
type Charge struct {
	Limit Limit
	// Key separates those who have a quota of their own, such as user ids. Empty
	// means one quota for all. Any text will do; see EncodeKey.
	Key string
	// Cost is the number of units, at least 1. 0 means 1.
	Cost int64
	// At is for Refund: Decision.Charges carry the time from which their units
	// count, so that exactly those are given back. Allow ignores it.
	At time.Time
}

// Limiter decides about charges. Memory and ratelimitredis.Limiter meet it; the
// suite in ratelimittest/conformance says what they promise. Methods are called
// by many goroutines.
type Limiter interface {
	// Allow takes all the charges if every limit admits its charge, and none
	// otherwise. A denial is a Decision, not an error. The error is ErrInvalid for
	// charges that make no sense, ErrUnavailable if the store cannot be asked, and
	// ctx's own if it ends first: the units may have been charged then.
	Allow(ctx context.Context, charges ...Charge) (Decision, error)

	// Refund gives charges back, as Decision.Charges holds them. What has already
	// lapsed is not given back, and no counter falls below 0. A charge without At
	// is given back to the current window.
	Refund(ctx context.Context, charges ...Charge) error
}

// Errors of this package.
var (
	// ErrInvalid is inside every error about limits and charges that make no
	// sense. Nothing was charged.
	ErrInvalid = errors.New("ratelimit: invalid charge")
	// ErrUnavailable says that the store could not be asked in time. Over HTTP it
	// is a 503. The units may or may not have been charged.
	ErrUnavailable = errors.New("ratelimit: store unavailable")
)

// MaxCharges bounds the number of charges in one decision.
const MaxCharges = 16

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
	case l.Algorithm > TokenBucket:
		fail("Algorithm %d is unknown", l.Algorithm)
	case l.Algorithm == SlidingWindow && l.Burst != 0:
		fail("Burst is for a token bucket")
	case l.Burst < 0:
		fail("Burst is %d, must not be negative", l.Burst)
	}
	if len(errs) == 0 && !l.exact() {
		fail("Max %d and Burst %d over %v are too large to count exactly", l.Max, l.Burst, l.Window)
	}
	return errors.Join(errs...)
}

// exact reports whether all that is computed with the limit stays an exact
// integer in a double: four times Max, or Burst, in units of a window.
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

// capacity is the most that one charge can take at once.
func (l Limit) capacity() int64 {
	if l.Algorithm == TokenBucket {
		return l.Burst
	}
	return l.Max
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

// Normalize returns the charges with defaults filled in, or everything that is
// wrong with them, wrapping ErrInvalid. It serves those who implement Limiter.
func Normalize(charges []Charge) ([]Charge, error) {
	if len(charges) == 0 || len(charges) > MaxCharges {
		return nil, fmt.Errorf("%w: %d charges, want 1 to %d", ErrInvalid, len(charges), MaxCharges)
	}
	out := make([]Charge, len(charges))
	var errs []error
	for i, c := range charges {
		errs = append(errs, c.Limit.Validate())
		if c.Cost < 0 {
			errs = append(errs, fmt.Errorf("%w: limit %.40q: Cost is %d, must not be negative", ErrInvalid, c.Limit.Name, c.Cost))
		}
		c.Limit = c.Limit.withDefaults()
		c.Cost = max(c.Cost, 1)
		for _, other := range out[:i] {
			if other.Limit.Name == c.Limit.Name && other.Key == c.Key {
				errs = append(errs, fmt.Errorf("%w: limit %.40q is charged twice for the same key", ErrInvalid, c.Limit.Name))
			}
		}
		out[i] = c
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return out, nil
}

// Finding is what the adapters' Check methods return: something that is missing
// or mis-set on the server, and how to mend it.
type Finding = check.Finding
