// Package ratelimittest is a scripted replacement for a rate limiter, for unit tests of code that uses one. For real
// decisions without a server use ratelimit.Memory; in a testing/synctest bubble it uses the bubble's clock.
package ratelimittest

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/driver"
)

// Limiter is a ratelimit.Limiter and a driver.Reserver that answers by script and records its calls. The zero value
// allows everything. It is safe for concurrent use.
type Limiter struct {
	mu       sync.Mutex
	script   []answer
	charged  [][]ratelimit.Charge
	refunded [][]ratelimit.Charge
}

type answer struct {
	decision ratelimit.Decision
	err      error
}

// New returns a Limiter that allows everything until a script is added.
func New() *Limiter { return &Limiter{} }

// Next adds an answer to the script. Each call of Allow or Reserve uses the next answer; after the last answer
// everything is allowed. An allowed decision gets At, Limits and Charges, unless it is a Fallback.
func (l *Limiter) Next(d ratelimit.Decision, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.script = append(l.script, answer{d, err})
}

// Deny scripts a denial by the named limit.
func (l *Limiter) Deny(limit string, retryAfter time.Duration) {
	l.Next(ratelimit.Decision{Denied: limit, RetryAfter: retryAfter}, nil)
}

// Fail scripts an error, such as ratelimit.ErrUnavailable.
func (l *Limiter) Fail(err error) { l.Next(ratelimit.Decision{}, err) }

// Allow implements ratelimit.Limiter.
func (l *Limiter) Allow(ctx context.Context, charges ...ratelimit.Charge) (ratelimit.Decision, error) {
	if err := ctx.Err(); err != nil {
		return ratelimit.Decision{}, err
	}
	normal, err := ratelimit.Charges(charges).Normalize()
	if err != nil {
		return ratelimit.Decision{}, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	d := ratelimit.Decision{Allowed: true}
	if len(l.script) > 0 {
		d, err = l.script[0].decision, l.script[0].err
		l.script = l.script[1:]
	}
	if err != nil || !d.Allowed || d.Fallback {
		return d, err
	}
	delay := d.Delay
	d.Decide(now(), 0, true, normal, make([]driver.Counter, len(normal)))
	d.Delay = delay
	l.charged = append(l.charged, d.Charges())
	return d, nil
}

// Reserve implements driver.Reserver.
func (l *Limiter) Reserve(ctx context.Context, within time.Duration, charges ...ratelimit.Charge) (ratelimit.Decision, error) {
	normal, err := ratelimit.Charges(charges).Normalize()
	if err != nil {
		return ratelimit.Decision{}, err
	}
	if err := normal.CheckReserve(within); err != nil {
		return ratelimit.Decision{}, err
	}
	return l.Allow(ctx, charges...)
}

// Peek returns the next answer of Allow, and does not change the script.
func (l *Limiter) Peek(ctx context.Context, charges ...ratelimit.Charge) (ratelimit.Decision, error) {
	if err := ctx.Err(); err != nil {
		return ratelimit.Decision{}, err
	}
	normal, err := ratelimit.Charges(charges).Normalize()
	if err != nil {
		return ratelimit.Decision{}, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.script) > 0 {
		if next := l.script[0]; next.err != nil || !next.decision.Allowed || next.decision.Fallback {
			return next.decision, next.err
		}
	}
	var d ratelimit.Decision
	d.Decide(now(), 0, false, normal, make([]driver.Counter, len(normal)))
	return d, nil
}

func now() time.Time { return time.Now().Truncate(time.Millisecond) }

// Reset only checks the charges.
func (l *Limiter) Reset(ctx context.Context, charges ...ratelimit.Charge) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	_, err := ratelimit.Charges(charges).Normalize()
	return err
}

// Refund implements ratelimit.Limiter.
func (l *Limiter) Refund(ctx context.Context, charges ...ratelimit.Charge) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	normal, err := ratelimit.Charges(charges).Normalize()
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.refunded = append(l.refunded, normal)
	return nil
}

// Charged returns the charges of every decision that allowed them, in order.
func (l *Limiter) Charged() [][]ratelimit.Charge {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.charged)
}

// Refunded returns the refunded charges, in order.
func (l *Limiter) Refunded() [][]ratelimit.Charge {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.refunded)
}
