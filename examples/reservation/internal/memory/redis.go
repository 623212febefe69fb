package memory

import (
	"context"
	"errors"
	"fmt"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/ratelimit"
)

// Keys are the idempotency keys, which are in Redis on real servers.
type Keys struct {
	*idempotencytest.Store
	wire Wire
}

func newKeys(wire Wire) *Keys {
	store := idempotencytest.NewStore()
	store.Lease = wire.Lease
	return &Keys{store, wire}
}

// Begin implements driver.Store.
func (k *Keys) Begin(ctx context.Context, claim driver.Claim) (result driver.BeginResult, err error) {
	err = k.wire.Call(ctx, RedisServer, StepKey, func() (err error) {
		result, err = k.Store.Begin(ctx, claim)
		return err
	})
	if err != nil {
		return driver.BeginResult{}, err
	}
	return result, nil
}

// Extend implements driver.Store.
func (k *Keys) Extend(ctx context.Context, claim driver.Claim) error {
	return k.wire.Call(ctx, RedisServer, StepKeyExtend, func() error { return k.Store.Extend(ctx, claim) })
}

// Complete implements driver.Store.
func (k *Keys) Complete(ctx context.Context, claim driver.Claim, resp driver.Response) error {
	return k.wire.Call(ctx, RedisServer, StepKeyComplete, func() error { return k.Store.Complete(ctx, claim, resp) })
}

// Release implements driver.Store.
func (k *Keys) Release(ctx context.Context, claim driver.Claim) error {
	return k.wire.Call(ctx, RedisServer, StepKeyRelease, func() error { return k.Store.Release(ctx, claim) })
}

// Limiter counts for the rate limits, which are in Redis on real servers.
type Limiter struct {
	*ratelimit.Memory
	wire Wire
}

// Allow implements ratelimit.Limiter.
func (l *Limiter) Allow(ctx context.Context, charges ...ratelimit.Charge) (d ratelimit.Decision, err error) {
	err = l.call(ctx, StepLimit, func() (err error) {
		d, err = l.Memory.Allow(ctx, charges...)
		return err
	})
	return d, err
}

// Peek returns what Allow would decide, and charges nothing.
func (l *Limiter) Peek(ctx context.Context, charges ...ratelimit.Charge) (d ratelimit.Decision, err error) {
	err = l.call(ctx, StepLimit, func() (err error) {
		d, err = l.Memory.Peek(ctx, charges...)
		return err
	})
	return d, err
}

// Refund implements ratelimit.Limiter.
func (l *Limiter) Refund(ctx context.Context, charges ...ratelimit.Charge) error {
	return l.call(ctx, StepRefund, func() error { return l.Memory.Refund(ctx, charges...) })
}

// Reset forgets what was charged.
func (l *Limiter) Reset(ctx context.Context, charges ...ratelimit.Charge) error {
	return l.call(ctx, StepRefund, func() error { return l.Memory.Reset(ctx, charges...) })
}

// call has the errors of the wire be those of a limiter that could not ask.
func (l *Limiter) call(ctx context.Context, step string, do func() error) error {
	var said error
	err := l.wire.Call(ctx, RedisServer, step, func() error {
		said = do()
		return said
	})
	if err == nil || errors.Is(err, said) {
		return err
	}
	return fmt.Errorf("%w: %w", ratelimit.ErrUnavailable, err)
}
