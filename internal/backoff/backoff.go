// Package backoff computes growing, jittered delays. It holds no state and no clock: callers count
// failures, draw random numbers and sleep.
package backoff

import (
	"math"
	"time"
)

// Policy describes a delay that grows by a factor with every failure and is spread by a random
// share. The zero Policy always returns 0.
type Policy struct {
	Base   time.Duration // delay at n = 0, before jitter
	Factor float64       // growth per step; 0 means 2
	Max    time.Duration // upper bound; 0 means none

	// Jitter is the share by which a delay is spread to either side: 0.5 multiplies it by a number
	// drawn from [0.5, 1.5). 0 means no jitter, 1 is the largest useful value.
	Jitter float64

	// JitterAfterCap applies Max before the jitter. Delays at the bound then stay spread out, and
	// may exceed Max by the share Jitter. By default Max comes last: nothing exceeds it, but most
	// delays near the bound are equal.
	JitterAfterCap bool

	// Full draws the delay evenly between 0 and Base × Factor^n, bounded by Max. It ignores Jitter.
	// It is the widest spread, at half the mean delay.
	Full bool
}

// Delay returns the delay Base × Factor^n, jittered by r and bounded by Max. r is a random number
// from [0, 1): 0.5 leaves the delay as it is, or halves it if Full is set. A negative n counts as
// 0. The result is never negative, even for a huge n.
func (p Policy) Delay(n int, r float64) time.Duration {
	factor := p.Factor
	if factor == 0 {
		factor = 2
	}
	limit := float64(math.MaxInt64)
	if p.Max > 0 {
		limit = float64(p.Max)
	}
	spread := 1 - p.Jitter + 2*p.Jitter*r

	d := float64(p.Base) * math.Pow(factor, float64(max(n, 0)))
	switch {
	case p.Full:
		return toDuration(min(d, limit) * r)
	case p.JitterAfterCap:
		return toDuration(min(d, limit) * spread)
	}
	return toDuration(min(d*spread, limit))
}

// toDuration converts d without overflow.
func toDuration(d float64) time.Duration {
	switch {
	case !(d > 0):
		return 0
	case d >= math.MaxInt64:
		return math.MaxInt64
	}
	return time.Duration(d)
}
