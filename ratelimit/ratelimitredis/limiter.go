package ratelimitredis

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/redisconn"
	"github.com/holdfast-go/holdfast/ratelimit"
)

// Limiter is a ratelimit.Limiter, and a ratelimit.Reserver, on Redis. Make it
// with New. It is safe for concurrent use.
type Limiter struct {
	client redis.UniversalClient
	cfg    Config
	shards []*shard
	idle   *redisconn.Idle
	local  *ratelimit.Memory // of the policy Local
	meters *meters

	decideScript, refundScript, resetScript *script

	down atomic.Bool // said in the log that the policy decides
}

// New returns a Limiter on client, which stays the caller's to close.
func New(client redis.UniversalClient, cfg Config) (*Limiter, error) {
	if client == nil {
		return nil, errors.New("ratelimitredis: client is nil")
	}
	cfg = cfg.withDefaults(client)
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	meters, err := newMeters(cfg.MeterProvider)
	if err != nil {
		return nil, fmt.Errorf("ratelimitredis: %w", err)
	}
	l := &Limiter{
		client: client, cfg: cfg, meters: meters, idle: &redisconn.Idle{Client: client, Timeout: cfg.Timeout},
		decideScript: newScript(decideSource), refundScript: newScript(refundSource), resetScript: newScript(resetSource),
	}
	for _, base := range bases(cfg) {
		l.shards = append(l.shards, newShard(base, client, cfg, meters))
	}
	if cfg.OnUnavailable == Local {
		if l.local, err = ratelimit.NewMemory(ratelimit.MemoryConfig{}); err != nil {
			return nil, err
		}
	}
	return l, nil
}

// Allow implements ratelimit.Limiter.
func (l *Limiter) Allow(ctx context.Context, charges ...ratelimit.Charge) (d ratelimit.Decision, err error) {
	if err := ctx.Err(); err != nil {
		return ratelimit.Decision{}, err
	}
	if cache := l.cache(charges); cache != nil && len(charges) <= ratelimit.MaxCharges && cache.Find(charges, &d) {
		l.meters.decided(ctx, &d)
		if l.cfg.Hooks.OnDecision != nil {
			l.cfg.Hooks.OnDecision(ctx, d, 0)
		}
		return d, nil
	}
	return l.observed(ctx, 0, slices.Clone(charges))
}

// Reserve implements ratelimit.Reserver.
func (l *Limiter) Reserve(ctx context.Context, within time.Duration, charges ...ratelimit.Charge) (ratelimit.Decision, error) {
	normal, err := ratelimit.Normalize(charges)
	if err != nil {
		return ratelimit.Decision{}, err
	}
	if err := ratelimit.CheckReserve(within, normal); err != nil {
		return ratelimit.Decision{}, err
	}
	return l.observed(ctx, within.Truncate(time.Millisecond), normal)
}

// Peek returns the decision that Allow would make now, and charges nothing. Its
// Remaining and Reset are those after the charge if that would be allowed. It is
// ErrUnavailable when Redis cannot be asked, whatever the policy.
func (l *Limiter) Peek(ctx context.Context, charges ...ratelimit.Charge) (ratelimit.Decision, error) {
	charges, err := ratelimit.Normalize(charges)
	if err != nil {
		return ratelimit.Decision{}, err
	}
	return l.decide(ctx, 0, false, charges)
}

// Refund implements ratelimit.Limiter. It is ErrUnavailable when Redis cannot be
// asked, whatever the policy; what the policy Local counted is given back within
// the process.
func (l *Limiter) Refund(ctx context.Context, charges ...ratelimit.Charge) error {
	charges, err := ratelimit.Normalize(charges)
	if err != nil {
		return err
	}
	if charges[0].Local && l.local != nil {
		return l.local.Refund(ctx, charges...)
	}
	return l.change(ctx, l.refundScript, charges)
}

// Reset forgets what was charged to the limits and keys of the charges, in this
// window and the one before. Other processes may deny for a second more; see
// Config.DenyCache.
func (l *Limiter) Reset(ctx context.Context, charges ...ratelimit.Charge) error {
	charges, err := ratelimit.Normalize(charges)
	if err != nil {
		return err
	}
	return l.change(ctx, l.resetScript, charges)
}

func (l *Limiter) change(ctx context.Context, s *script, charges []ratelimit.Charge) error {
	err := l.run(ctx, &call{script: s, charges: charges})
	if cache := l.cache(charges); cache != nil {
		cache.Forget(charges)
	}
	return err
}

// cache returns where denials of the charges are remembered, or nil.
func (l *Limiter) cache(charges []ratelimit.Charge) *ratelimit.DenyCache {
	s, err := l.shard(charges)
	if err != nil {
		return nil
	}
	return s.denials
}

// observed decides, applies the policy and reports.
func (l *Limiter) observed(ctx context.Context, within time.Duration, given []ratelimit.Charge) (ratelimit.Decision, error) {
	charges, err := ratelimit.Normalize(given)
	if err != nil {
		return ratelimit.Decision{}, err
	}
	start := time.Now()
	d, err := l.decide(ctx, within, true, charges)
	switch {
	case errors.Is(err, ratelimit.ErrUnavailable):
		if l.cfg.Hooks.OnUnavailable != nil {
			l.cfg.Hooks.OnUnavailable(ctx, err)
		}
		if d, err = l.fallBack(ctx, within, charges, err); err != nil {
			l.meters.unavailable(ctx)
			l.meters.took(ctx, time.Since(start))
			return ratelimit.Decision{}, err
		}
	case err != nil:
		return ratelimit.Decision{}, err
	default:
		l.recovered(ctx)
		if cache := l.cache(given); cache != nil && within == 0 {
			cache.Keep(start, given, d)
		}
	}
	took := time.Since(start)
	l.meters.decided(ctx, &d)
	l.meters.took(ctx, took)
	if l.cfg.Hooks.OnDecision != nil {
		l.cfg.Hooks.OnDecision(ctx, d, took)
	}
	return d, nil
}

// decide asks the script and works out the details from the state that it saw,
// with the arithmetic that all limiters share. The charges are normalized.
func (l *Limiter) decide(ctx context.Context, within time.Duration, take bool, charges []ratelimit.Charge) (ratelimit.Decision, error) {
	if l.cfg.Shards > 1 {
		charges = slices.Clone(charges) // for the shares of the limits
		if err := l.share(charges); err != nil {
			return ratelimit.Decision{}, err
		}
	}
	possible := !slices.ContainsFunc(charges, tooMuch)
	c := &call{script: l.decideScript, many: true, charges: charges, take: take && possible, within: within.Milliseconds()}
	if err := l.run(ctx, c); err != nil {
		return ratelimit.Decision{}, err
	}
	var few [3]ratelimit.Counter // most decisions need no more
	counters := append(few[:0], make([]ratelimit.Counter, len(charges))...)
	for i, charge := range charges {
		sane := int64(1<<53) / charge.Limit.Window.Milliseconds() // whatever a foreign value says
		if charge.Limit.Algorithm == ratelimit.TokenBucket {
			sane = 1 << 53
		}
		counters[i] = ratelimit.Counter{Prev: min(c.reply[1+2*i], sane), Cur: min(c.reply[2+2*i], sane)}
	}
	d := ratelimit.Decide(time.UnixMilli(c.now), within, take, charges, counters)
	if possible && d.Allowed != (c.reply[0] == 1) {
		return ratelimit.Decision{}, fmt.Errorf("%w: script and client disagree", ratelimit.ErrUnavailable)
	}
	return d, nil
}

// tooMuch reports whether a charge can never be admitted.
func tooMuch(c ratelimit.Charge) bool {
	if c.Limit.Algorithm == ratelimit.TokenBucket {
		return c.Cost > c.Limit.Burst
	}
	return c.Cost > c.Limit.Max
}

// run has a call answered unless Redis is known not to answer. Its error is
// ErrUnavailable, ErrInvalid or that of ctx.
func (l *Limiter) run(ctx context.Context, c *call) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	s, err := l.shard(c.charges)
	if err != nil {
		return err
	}
	c.base = s.base
	if !s.breaker.Enter() {
		return fmt.Errorf("%w: %w", ratelimit.ErrUnavailable, errOpen)
	}
	if err = s.lanes.Do(ctx, c); err == nil {
		err = c.err
	}
	if err != nil && ctx.Err() != nil {
		return ctx.Err()
	}
	s.breaker.Done(err == nil)
	if err != nil {
		if answered := redis.Error(nil); !errors.As(err, &answered) {
			l.idle.Test(ctx, nameOf(c.base, c.charges[0]))
		}
		return fmt.Errorf("%w: %w", ratelimit.ErrUnavailable, err)
	}
	return nil
}
