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

// fallBack decides as the policy says. The error is the cause, or that of the
// local limiter.
func (l *Limiter) fallBack(ctx context.Context, within time.Duration, charges []ratelimit.Charge, cause error) (ratelimit.Decision, error) {
	if l.cfg.OnUnavailable == Deny {
		return ratelimit.Decision{}, cause
	}
	if !l.down.Swap(true) {
		l.cfg.Logger.WarnContext(ctx, "ratelimit: store unavailable, the failure policy decides", slog.Any("error", cause))
	}
	if l.local == nil {
		return ratelimit.Decision{Allowed: true, Fallback: true}, nil
	}
	possible := !slices.ContainsFunc(charges, tooMuch)
	charges = slices.Clone(charges) // a call under way may still be reading them
	for i := range charges {
		limit := &charges[i].Limit
		limit.Max = max(1, limit.Max/int64(l.cfg.Replicas))
		if limit.Algorithm == ratelimit.TokenBucket {
			limit.Burst = max(1, limit.Burst/int64(l.cfg.Replicas))
		}
	}
	var d ratelimit.Decision
	var err error
	if within > 0 {
		d, err = l.local.Reserve(ctx, within, charges...)
	} else {
		d, err = l.local.Allow(ctx, charges...)
	}
	if d.Never && possible { // too much for the share of this process, not for the limit
		d.Never, d.RetryAfter = false, l.cfg.ProbeEvery
	}
	d.Fallback = true
	return d, err
}

// recovered says once that Redis answers again.
func (l *Limiter) recovered(ctx context.Context) {
	if l.down.Load() && l.down.Swap(false) {
		l.cfg.Logger.InfoContext(ctx, "ratelimit: store available again")
	}
}
