package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/ratelimit/internal/bounds"
)

// Algorithm selects how a Limit counts.
type Algorithm uint8

const (
	// SlidingWindow weighs two counters: the current window's, and the previous window's by the share of it that a
	// window ending now still covers. It is the default. A burst around a boundary may admit up to 2 × Max - 1 within
	// an unaligned window.
	SlidingWindow Algorithm = iota

	// TokenBucket holds Burst tokens and gains Max tokens per Window, evenly. It is equivalent to GCRA: a bucket with
	// a Burst of 1 spaces its units evenly.
	TokenBucket

	// FixedWindow counts only the current window, as for quotas per hour or day. A burst around a boundary may admit
	// 2 × Max within an unaligned window.
	FixedWindow
)

// Limit is a maximum number of units per time. A value is ready for use; every call checks it like Validate.
type Limit struct {
	// Name identifies the limit in keys, headers and decisions: 1 to 32 of [a-z0-9_-]. Required. Limits with the same
	// name and Window share their counters, whatever their Max: a new plan takes effect at once and keeps the
	// counters.
	Name string
	// Max is the number of units per Window, at least 1. Required.
	Max int64
	// Window is the period of Max: whole milliseconds, from 1 s to 366 days. Default: 1 minute.
	Window time.Duration
	// Algorithm selects how to count. Default: SlidingWindow.
	Algorithm Algorithm
	// Burst is the size of a token bucket; for other algorithms it must be 0. Default: Max.
	Burst int64
}

const (
	minWindow  = time.Second
	maxWindow  = 366 * 24 * time.Hour
	maxName    = 32
	exactFloat = 1 << 53 // Redis scripts count in doubles, which are exact below this number
)

// Validate reports everything that is wrong with the limit; the error wraps ErrInvalid.
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
		fail("Burst is %d, but only a TokenBucket has a burst", l.Burst)
	case l.Burst < 0:
		fail("Burst is %d, must not be negative", l.Burst)
	}
	if len(errs) == 0 && !l.exact() {
		fail("Max %d and Burst %d over %v are too large to count exactly", l.Max, l.Burst, l.Window)
	}
	return errors.Join(errs...)
}

// exact reports whether all results computed from the limit are exact integers in a double: up to four times Max, or
// Burst, in units of a window.
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

// rule is a valid Limit, prepared for the arithmetic.
type rule struct {
	Limit       // with defaults
	given Limit // as the caller wrote it

	w    int64 // the window in milliseconds
	most int64 // the largest possible charge
	unit int64 // the amount that one unit adds to counter.Cur
	full int64 // the capacity of the limit, in units times w
}

func ruleOf(given Limit) rule {
	l := given.withDefaults()
	r := rule{Limit: l, given: given, w: l.windowMS(), most: l.Max, unit: 1}
	if r.bucket() {
		r.most, r.unit = l.Burst, r.w
	}
	r.full = r.most * r.w
	return r
}

func (r *rule) bucket() bool { return r.Algorithm == TokenBucket }

// used returns the amount to compare with full, elapsed milliseconds into the window.
func (r *rule) used(c counter, elapsed int64) int64 {
	switch r.Algorithm {
	case TokenBucket:
		return c.Cur
	case FixedWindow:
		return c.Cur * r.w
	}
	return c.Prev*(r.w-elapsed) + c.Cur*r.w
}

// wait returns the milliseconds until the rule admits cost if no other charges come, and 0 if it admits cost now.
// cost is at most r.most.
func (r *rule) wait(c counter, cost, elapsed int64) int64 {
	over := r.used(c, elapsed) + cost*r.w - r.full
	switch {
	case over <= 0:
		return 0
	case r.bucket():
		return ceilDiv(over, r.Max)
	case r.Algorithm == FixedWindow:
		return r.w - elapsed
	case c.Cur+cost <= r.Max: // until enough of the previous window has passed
		return r.w - (r.Max-c.Cur-cost)*r.w/c.Prev - elapsed
	}
	return r.w - elapsed + max(0, r.w-(r.Max-cost)*r.w/c.Cur) // the same, one window later
}

func (r *rule) remaining(c counter, elapsed int64) int64 {
	return max(0, r.full-r.used(c, elapsed)) / r.w
}

// reset returns the milliseconds until the window ends or the bucket is full.
func (r *rule) reset(c counter, elapsed int64) int64 {
	if r.bucket() {
		return ceilDiv(c.Cur, r.Max)
	}
	return r.w - elapsed
}

// elapsed returns the time since the start of now's window; 0 for a bucket.
func (r *rule) elapsed(now int64) int64 {
	if r.bucket() {
		return 0
	}
	return now % r.w
}

// drain returns the amount missing from a bucket, elapsed milliseconds after missing was measured.
func (r *rule) drain(missing, elapsed int64) int64 {
	switch {
	case elapsed <= 0:
		return missing
	case elapsed > missing/r.Max:
		return 0
	}
	return missing - elapsed*r.Max
}

// refund takes a charge made at since off the counter. The counter must be brought forward to now.
func (r *rule) refund(c *counter, cost, since, now int64) {
	cost = min(cost, r.most) // more cannot have been charged
	if r.bucket() {
		c.Cur -= min(c.Cur, r.drain(cost*r.unit, now-since))
		return
	}
	switch now/r.w - since/r.w {
	case 0:
		c.Cur -= min(c.Cur, cost)
	case 1:
		c.Prev -= min(c.Prev, cost)
	}
}

func ceilDiv(a, b int64) int64 {
	if a <= 0 {
		return 0
	}
	return (a + b - 1) / b
}

// ms converts without overflow, and leaves room for rounding up: a bucket with a nonsense value from another system
// may take longer to drain than a Duration can hold.
func ms(n int64) time.Duration {
	return time.Duration(min(n, math.MaxInt64/2/int64(time.Millisecond))) * time.Millisecond
}

// countsWith reports whether two rules share their counter under one key.
func (r *rule) countsWith(other *rule) bool {
	return r.Name == other.Name && r.bucket() == other.bucket() && r.w == other.w
}

// maxRules limits the cached rules. There is one rule for each plan.
const maxRules = 1000

// rules caches the rules of limits, so that a limit is checked only once and counters share its rule. The zero value
// is ready for use.
type rules struct {
	mu    sync.Mutex
	known map[Limit]*rule
}

// of returns the limit's rule, or nil if the limit is invalid.
func (r *rules) of(given Limit) *rule {
	r.mu.Lock()
	defer r.mu.Unlock()
	if known := r.known[given]; known != nil {
		return known
	}
	if given.Validate() != nil {
		return nil
	}
	if r.known == nil || len(r.known) >= maxRules {
		r.known = map[Limit]*rule{}
	}
	made := ruleOf(given)
	r.known[given] = &made
	return &made
}

// Charge is the cost of a request for one limit.
type Charge struct {
	// Limit is the limit. Required.
	Limit Limit
	// Key separates callers with their own quotas, for example by user id. Any text is allowed; the package comment
	// describes how it is stored. Default: empty, one quota for all.
	Key string
	// Cost is the number of units, at least 1. Default: 1.
	Cost int64
	// At is for Refund: Decision.Charges sets the time from which the units count, so that exactly these are
	// refunded. Allow ignores it. Optional.
	At time.Time
	// Local is for Refund: the charge was counted within the process while the store was unavailable. Allow ignores
	// it. Optional.
	Local bool
}

// Limiter decides about charges. Memory, Leased and ratelimitredis.Limiter implement it. Package driver has the types
// for other implementations. All methods are safe for concurrent use.
type Limiter interface {
	// Allow takes all charges if every limit admits its charge, and none otherwise. A denial is a Decision, not an
	// error; Decision.Err converts it. The error is ErrInvalid for invalid charges, ErrUnavailable if the store is
	// unavailable, and ctx's own error if ctx ends first: then the units may have been charged.
	Allow(ctx context.Context, charges ...Charge) (Decision, error)

	// Refund returns charges, as Decision.Charges has them. Units that have lapsed are not returned, and no counter
	// falls below 0. A charge without At is returned to the current window. After ErrUnavailable or ctx's own error,
	// the units may have been returned. A second Refund could then admit other charges beyond the limit.
	Refund(ctx context.Context, charges ...Charge) error
}

// Charges are the charges of one decision. Its methods are for implementations of Limiter.
type Charges []Charge

// Normalize returns the charges with defaults filled in, or an error with all problems, wrapping ErrInvalid. It does
// not change the charges themselves.
func (cs Charges) Normalize() (Charges, error) {
	if err := cs.checkCount(); err != nil {
		return nil, err
	}
	normal := slices.Clone(cs)
	var errs []error
	for i := range normal {
		c := &normal[i]
		if err := c.Limit.Validate(); err != nil {
			errs = append(errs, err)
		}
		if c.Cost < 0 {
			errs = append(errs, fmt.Errorf("%w: limit %.40q: Cost is %d, must not be negative", ErrInvalid, c.Limit.Name, c.Cost))
		}
		c.Limit = c.Limit.withDefaults()
		c.Cost = max(c.Cost, 1)
		for _, other := range normal[:i] {
			if other.Limit.Name == c.Limit.Name && other.Key == c.Key {
				errs = append(errs, fmt.Errorf("%w: limit %.40q is charged twice for the same key", ErrInvalid, c.Limit.Name))
			}
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return normal, nil
}

func (cs Charges) checkCount() error {
	if len(cs) == 0 || len(cs) > bounds.Charges {
		return fmt.Errorf("%w: %d charges, want 1 to %d", ErrInvalid, len(cs), bounds.Charges)
	}
	return nil
}

// CheckReserve returns an error that wraps ErrInvalid if the normalized charges cannot be reserved within that time.
func (cs Charges) CheckReserve(within time.Duration) error {
	if within < 0 || within > bounds.Reserve {
		return fmt.Errorf("%w: within is %v, must lie between 0 and %v", ErrInvalid, within, bounds.Reserve)
	}
	for _, c := range cs {
		if c.Limit.Algorithm != TokenBucket {
			return fmt.Errorf("%w: limit %.40q cannot be reserved: it is no token bucket", ErrInvalid, c.Limit.Name)
		}
		if c.Limit.Max > exactFloat/2/bounds.Reserve.Milliseconds() {
			return fmt.Errorf("%w: limit %.40q is too large to reserve", ErrInvalid, c.Limit.Name)
		}
	}
	return nil
}
