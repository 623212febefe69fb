package memory

import (
	"context"
	"fmt"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/ratelimit"
)

// Keys are the idempotency keys, which are in Redis on real servers.
type Keys struct {
	*idempotencytest.Store
	redis *Server
}

// Begin implements driver.Store.
func (k *Keys) Begin(ctx context.Context, claim driver.Claim) (driver.BeginResult, error) {
	if err := k.redis.Ready(ctx); err != nil {
		return driver.BeginResult{}, err
	}
	return k.Store.Begin(ctx, claim)
}

// Extend implements driver.Store.
func (k *Keys) Extend(ctx context.Context, claim driver.Claim) error {
	if err := k.redis.Ready(ctx); err != nil {
		return err
	}
	return k.Store.Extend(ctx, claim)
}

// Complete implements driver.Store.
func (k *Keys) Complete(ctx context.Context, claim driver.Claim, resp driver.Response) error {
	if err := k.redis.Ready(ctx); err != nil {
		return err
	}
	return k.Store.Complete(ctx, claim, resp)
}

// Release implements driver.Store.
func (k *Keys) Release(ctx context.Context, claim driver.Claim) error {
	if err := k.redis.Ready(ctx); err != nil {
		return err
	}
	return k.Store.Release(ctx, claim)
}

// Limiter counts for the rate limits, which are in Redis on real servers.
type Limiter struct {
	*ratelimit.Memory
	redis *Server
}

// Allow implements ratelimit.Limiter.
func (l *Limiter) Allow(ctx context.Context, charges ...ratelimit.Charge) (ratelimit.Decision, error) {
	if err := l.ready(ctx); err != nil {
		return ratelimit.Decision{}, err
	}
	return l.Memory.Allow(ctx, charges...)
}

// Peek returns what Allow would decide, and charges nothing.
func (l *Limiter) Peek(ctx context.Context, charges ...ratelimit.Charge) (ratelimit.Decision, error) {
	if err := l.ready(ctx); err != nil {
		return ratelimit.Decision{}, err
	}
	return l.Memory.Peek(ctx, charges...)
}

// Refund implements ratelimit.Limiter.
func (l *Limiter) Refund(ctx context.Context, charges ...ratelimit.Charge) error {
	if err := l.ready(ctx); err != nil {
		return err
	}
	return l.Memory.Refund(ctx, charges...)
}

// Reset forgets what was charged.
func (l *Limiter) Reset(ctx context.Context, charges ...ratelimit.Charge) error {
	if err := l.ready(ctx); err != nil {
		return err
	}
	return l.Memory.Reset(ctx, charges...)
}

func (l *Limiter) ready(ctx context.Context) error {
	if err := l.redis.Ready(ctx); err != nil {
		return fmt.Errorf("%w: %w", ratelimit.ErrUnavailable, err)
	}
	return nil
}
