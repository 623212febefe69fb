package ratelimit

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/holdfast-go/holdfast/internal/problem"
)

// counter is the stored state of one limit; driver.Counter is the same type.
type counter = struct {
	// Prev and Cur count the units charged in the previous and in the current window. For a TokenBucket, Cur is the
	// amount missing from a full bucket, and Prev is 0. See driver.Counter.
	Prev, Cur int64
}

// Decision is the answer of a Limiter. It is an immutable value.
type Decision struct {
	// Allowed reports whether the charges were taken: all or none.
	Allowed bool
	// Never means that a cost is more than its limit can ever hold.
	Never bool
	// Fallback means that the store was unavailable, and that the limiter's setting for this case decided.
	Fallback bool
	// Cached means that a denial was remembered and the store was not contacted again.
	Cached bool
	// Denied is the name of the limit that decided: the one with the longest RetryAfter. Empty if Allowed.
	Denied string
	// RetryAfter is how long after At the same charges would be allowed if no other charges came: exact to the
	// millisecond. If Cached, a limit that filled up in the meantime may make it longer. Zero if Allowed or Never.
	RetryAfter time.Duration
	// Delay is how long to wait before acting on a reservation; see Waiter.Reserve. Zero otherwise.
	Delay time.Duration
	// At is the time of the decision by the store's clock, in milliseconds.
	At time.Time

	taken bool // the charges were counted: not a Peek
	n     int
	few   [fewParts]part
	many  []part // all parts, if they do not fit in few
}

// fewParts is the number of limits that a Decision holds without an allocation: user, IP and global.
const fewParts = 3

// part is the part of a decision about one limit.
type part struct {
	rule    *rule
	key     string
	cost    int64
	counter counter // after the decision
}

// State is the state of one limit after a decision.
type State struct {
	Name   string        // of the limit
	Max    int64         // units per Window
	Window time.Duration // with its default filled in
	// Capacity is the largest possible charge: Max, or the size of a bucket.
	Capacity int64
	// Remaining is the number of units that could be charged now.
	Remaining int64
	// Reset is the time until more is available. For a limit that denied: until it admits the charge. Otherwise:
	// until the current window ends or the bucket is full.
	Reset time.Duration
}

// grow makes room for n parts.
func (d *Decision) grow(n int) {
	d.n = n
	if n > fewParts {
		d.many = make([]part, n)
	}
}

func (d *Decision) parts() []part {
	if d.n > fewParts {
		return d.many
	}
	return d.few[:d.n]
}

// Decide is for implementations of Limiter. It decides about normalized charges at the time at, in whole
// milliseconds, and stores the decision in d. counters are the states of the limits at that time; the charges are
// added to them if all are admitted. A reservation may wait for tokens up to within; within is 0 for other calls. If
// take is false, as for a Peek, d has no Charges to refund.
//
// The counters must not change between the time they are read and the time they are stored. Deciding again about the
// limits of d allocates nothing.
func (d *Decision) Decide(at time.Time, within time.Duration, take bool, charges []Charge, counters []struct{ Prev, Cur int64 }) {
	if !d.holds(charges) {
		*d = Decision{}
		d.grow(len(charges))
		rules := make([]rule, len(charges)) // in one allocation: one for each costs as much as the rest
		for i := range charges {
			rules[i] = ruleOf(charges[i].Limit)
			d.parts()[i].rule = &rules[i]
		}
	}
	d.At, d.Fallback, d.Cached, d.taken = at, false, false, false
	d.Never, d.Denied, d.RetryAfter, d.Delay = false, "", 0, 0
	var space [fewParts]int64
	elapsed := space[:0]
	for i := range charges {
		c, p := &charges[i], &d.parts()[i]
		p.key, p.cost, p.counter = c.Key, c.Cost, counters[i]
		elapsed = append(elapsed, p.rule.elapsed(at.UnixMilli()))
	}
	d.settle(within, take, elapsed)
	for i, p := range d.parts() {
		counters[i] = p.counter
	}
}

// holds reports whether d was a decision about the limits of the charges, and shares its parts with no other
// decision.
func (d *Decision) holds(charges []Charge) bool {
	if d.n != len(charges) || d.n > fewParts {
		return false
	}
	for i, p := range d.parts() {
		if p.rule.given != charges[i].Limit {
			return false
		}
	}
	return true
}

// Counters is for implementations of Limiter. It returns the states of the limits after the decision, in the order of
// the charges.
func (d Decision) Counters() []struct{ Prev, Cur int64 } {
	counters := make([]counter, d.n)
	for i, p := range d.parts() {
		counters[i] = p.counter
	}
	return counters
}

// settle decides about the parts, which hold the current counters, and charges them if all are admitted. elapsed is
// the time since the start of each limit's window.
func (d *Decision) settle(within time.Duration, take bool, elapsed []int64) {
	d.Allowed = true
	parts := d.parts()
	for i := range parts {
		p := &parts[i]
		if p.cost > p.rule.most {
			d.deny(p.rule.Name, 0, true)
			continue
		}
		wait := ms(p.rule.wait(p.counter, p.cost, elapsed[i]))
		switch {
		case wait == 0:
		case p.rule.bucket() && wait <= within:
			d.Delay = max(d.Delay, wait)
		default:
			d.deny(p.rule.Name, wait, false)
		}
	}
	if !d.Allowed {
		d.Delay = 0
		return
	}
	d.taken = take
	for i := range parts {
		parts[i].counter.Cur += parts[i].cost * parts[i].rule.unit
	}
}

// deny records the limit with the longest wait.
func (d *Decision) deny(name string, wait time.Duration, never bool) {
	if d.Never || !d.Allowed && !never && wait <= d.RetryAfter {
		return
	}
	d.Allowed, d.Never, d.Denied, d.RetryAfter = false, never, name, wait
}

// Limits returns the state of each limit after the decision, in the order of the charges. It is empty if the request
// passed uncounted because the store was unavailable. If the denial is Cached, it has only the limits that denied.
func (d Decision) Limits() []State {
	states := make([]State, d.n)
	for i, p := range d.parts() {
		states[i] = d.state(p)
	}
	return states
}

func (d *Decision) state(p part) State {
	elapsed := p.rule.elapsed(d.At.UnixMilli())
	s := State{
		Name: p.rule.Name, Max: p.rule.Max, Window: p.rule.Window, Capacity: p.rule.most,
		Remaining: p.rule.remaining(p.counter, elapsed), Reset: ms(p.rule.reset(p.counter, elapsed)),
	}
	if !d.Allowed && p.cost <= p.rule.most {
		if wait := p.rule.wait(p.counter, p.cost, elapsed); wait > 0 {
			s.Reset = ms(wait)
		}
	}
	return s
}

// Binding returns the state of the most important limit: the limit that denied, or the limit with the smallest share
// left. It is false if there are no limits.
func (d Decision) Binding() (State, bool) {
	var binding State
	least, found := 0.0, false
	for _, p := range d.parts() {
		s := d.state(p)
		share := float64(s.Remaining) / float64(s.Capacity)
		if (d.Denied == "" || s.Name == d.Denied) && (!found || share < least) {
			binding, least, found = s, share, true
		}
	}
	return binding, found
}

// Charges returns the charges that were taken, for Refund. It is nil if they were denied or not counted.
func (d Decision) Charges() []Charge {
	if !d.taken {
		return nil
	}
	charges := make([]Charge, d.n)
	for i, p := range d.parts() {
		charges[i] = Charge{Limit: p.rule.given.withDefaults(), Key: p.key, Cost: p.cost, At: d.At, Local: d.Fallback}
		if p.rule.bucket() { // its units are regained after all earlier charges
			charges[i].At = d.At.Add(ms((p.counter.Cur - p.cost*p.rule.unit) / p.rule.Max))
		}
	}
	return charges
}

// refunded returns the decision as if its charges were refunded.
func (d Decision) refunded() Decision {
	d.many = slices.Clone(d.many)
	for i := range d.parts() {
		p := &d.parts()[i]
		p.counter.Cur -= min(p.counter.Cur, p.cost*p.rule.unit)
	}
	return d
}

// violated returns the names of the limits that denied.
func (d *Decision) violated() []string {
	var names []string
	for _, p := range d.parts() {
		if p.cost > p.rule.most || p.rule.wait(p.counter, p.cost, p.rule.elapsed(d.At.UnixMilli())) > 0 {
			names = append(names, p.rule.Name)
		}
	}
	if names == nil && d.Denied != "" { // a decision made elsewhere
		names = []string{d.Denied}
	}
	return names
}

// Errors of this package. Errors that reach a client have the methods Code() string and HTTPStatus() int, and
// RetryAfter() time.Duration if waiting helps: ErrNoKey is 400 RATE_LIMIT_KEY_REQUIRED, ErrUnavailable is 503
// RATE_LIMIT_UNAVAILABLE, and the error of Decision.Err is 429 RATE_LIMITED.
var (
	// ErrInvalid is in every error about invalid limits or charges. Nothing was charged.
	ErrInvalid = errors.New("ratelimit: invalid charge")
	// ErrUnavailable means that the store did not answer in time. The units may or may not have been charged.
	ErrUnavailable error = &problem.Error{Text: "ratelimit: store unavailable", Problem: problem.Problem{
		Status: http.StatusServiceUnavailable, Code: "RATE_LIMIT_UNAVAILABLE",
		Detail: "The rate limit cannot be checked at the moment.", RetryAfter: time.Second,
	}}
	// ErrNoKey is returned by key functions for a request that does not identify the caller to charge. Such requests
	// are rejected, because they would otherwise share a quota.
	ErrNoKey error = &problem.Error{Text: "ratelimit: request has no key", Problem: problem.Problem{
		Status: http.StatusBadRequest, Code: "RATE_LIMIT_KEY_REQUIRED",
		Detail: "The request does not identify the caller to charge.",
	}}
	// ErrWaitTooLong means that the charges will not be allowed within the time of a Waiter.
	ErrWaitTooLong = errors.New("ratelimit: wait too long")
	// ErrNever means that a cost is more than its limit can ever hold.
	ErrNever = errors.New("ratelimit: cost exceeds limit")

	errNilLimiter = errors.New("ratelimit: limiter is nil")
)

// Err returns nil if the decision allows. Otherwise the error has the code RATE_LIMITED, the status 429 and the
// method RetryAfter() time.Duration. If Never, it is ErrNever and RetryAfter is 0.
func (d Decision) Err() error {
	if d.Allowed {
		return nil
	}
	return &deniedError{limit: d.Denied, wait: d.RetryAfter, never: d.Never}
}

// deniedError is a denial as an error.
type deniedError struct {
	limit string
	wait  time.Duration
	never bool
}

func (e *deniedError) Error() string {
	if e.never {
		return fmt.Sprintf("%v: limit %q", ErrNever, e.limit)
	}
	return fmt.Sprintf("ratelimit: denied by limit %q for %v", e.limit, e.wait)
}

func (e *deniedError) Code() string              { return "RATE_LIMITED" }
func (e *deniedError) HTTPStatus() int           { return http.StatusTooManyRequests }
func (e *deniedError) RetryAfter() time.Duration { return e.wait }

// Detail is the detail of the problem for the client.
func (e *deniedError) Detail() string {
	if e.never {
		return "The request costs more than its limit allows at any time."
	}
	return ""
}

func (e *deniedError) Unwrap() error {
	if e.never {
		return ErrNever
	}
	return nil
}
