package ratelimitredis

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/holdfast-go/holdfast/ratelimit"
)

var errOpen = errors.New("redis has not answered lately, waiting for the next probe")

// fallBack decides while Redis cannot be asked, as Config.FailOpen and Config.Replicas say. The error
// is the cause, or that of the local limiter.
func (l *Limiter) fallBack(ctx context.Context, within time.Duration, charges []ratelimit.Charge, cause error) (ratelimit.Decision, error) {
	if !l.cfg.FailOpen && l.local == nil {
		return ratelimit.Decision{}, cause
	}
	if !l.down.Swap(true) {
		l.cfg.Logger.WarnContext(ctx, "ratelimit: store unavailable, requests are decided without it",
			slog.Bool("counted", l.local != nil), slog.Any("error", cause))
	}
	if l.local == nil {
		return ratelimit.Decision{Allowed: true, Fallback: true}, nil
	}
	d, err := l.countHere(ctx, within, l.shareOf(charges))
	if d.Never && !slices.ContainsFunc(charges, tooMuch) { // too much for the share of this process, not for the limit
		d.Never, d.RetryAfter = false, probeEvery
	}
	d.Fallback = true
	return d, err
}

func (l *Limiter) countHere(ctx context.Context, within time.Duration, charges []ratelimit.Charge) (ratelimit.Decision, error) {
	if within > 0 {
		return l.local.Reserve(ctx, within, charges...)
	}
	return l.local.Allow(ctx, charges...)
}

// shareOf returns the charges with this process's share of their limits.
func (l *Limiter) shareOf(charges []ratelimit.Charge) []ratelimit.Charge {
	replicas := int64(l.cfg.Replicas)
	charges = slices.Clone(charges) // a call under way may still be reading them
	for i := range charges {
		limit := &charges[i].Limit
		limit.Max = max(1, limit.Max/replicas)
		if limit.Algorithm == ratelimit.TokenBucket {
			limit.Burst = max(1, limit.Burst/replicas)
		}
	}
	return charges
}

// recovered says once that Redis answers again.
func (l *Limiter) recovered(ctx context.Context) {
	if l.down.Load() && l.down.Swap(false) {
		l.cfg.Logger.InfoContext(ctx, "ratelimit: store available again")
	}
}
