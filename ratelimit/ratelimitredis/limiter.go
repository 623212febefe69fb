package ratelimitredis

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/holdfast-go/holdfast/internal/telemetry"
	"github.com/holdfast-go/holdfast/ratelimit"
)

const scope = "github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"

// Limiter is a ratelimit.Limiter, and a ratelimit.Reserver, on Redis. Make it
// with New. It is safe for concurrent use.
type Limiter struct {
	client redis.UniversalClient
	cfg    Config
	base   string // of every key
	decide *redis.Script
	refund *redis.Script
	offset atomic.Int64 // the server's clock minus ours, in milliseconds
	down   atomic.Bool  // said in the log that requests pass unmetered

	decisions metric.Int64Counter
	duration  metric.Float64Histogram
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
	meter := telemetry.New(scope, nil, cfg.MeterProvider).Meter
	decisions, err1 := meter.Int64Counter("holdfast.ratelimit.decisions",
		metric.WithDescription("Decisions by outcome, and by the limit that denied."), metric.WithUnit("{decision}"))
	duration, err2 := meter.Float64Histogram("holdfast.ratelimit.duration",
		metric.WithDescription("Duration of a decision."), metric.WithUnit("s"))
	if err := errors.Join(err1, err2); err != nil {
		return nil, fmt.Errorf("ratelimitredis: %w", err)
	}
	base := cfg.Prefix + ":"
	if cfg.Tag != "" {
		base += "{" + cfg.Tag + "}:"
	}
	return &Limiter{
		client:    client,
		cfg:       cfg,
		base:      base,
		decide:    redis.NewScript(commonSource + decideSource),
		refund:    redis.NewScript(commonSource + refundSource),
		decisions: decisions,
		duration:  duration,
	}, nil
}

// Allow implements ratelimit.Limiter.
func (l *Limiter) Allow(ctx context.Context, charges ...ratelimit.Charge) (ratelimit.Decision, error) {
	charges, err := ratelimit.Normalize(charges)
	if err != nil {
		return ratelimit.Decision{}, err
	}
	return l.observed(ctx, 0, charges)
}

// Reserve implements ratelimit.Reserver.
func (l *Limiter) Reserve(ctx context.Context, within time.Duration, charges ...ratelimit.Charge) (ratelimit.Decision, error) {
	charges, err := ratelimit.Normalize(charges)
	if err != nil {
		return ratelimit.Decision{}, err
	}
	if err := ratelimit.CheckReserve(within, charges); err != nil {
		return ratelimit.Decision{}, err
	}
	return l.observed(ctx, within, charges)
}

// Peek returns the decision that Allow would make now, and charges nothing. Its
// Remaining and Reset are those after the charge if that would be allowed. It is
// ErrUnavailable when Redis cannot be asked, whatever the policy.
func (l *Limiter) Peek(ctx context.Context, charges ...ratelimit.Charge) (ratelimit.Decision, error) {
	charges, err := ratelimit.Normalize(charges)
	if err != nil {
		return ratelimit.Decision{}, err
	}
	d, err := l.decision(ctx, 0, false, charges)
	d.Charges = nil
	return d, err
}

// Refund implements ratelimit.Limiter. It is ErrUnavailable when Redis cannot be
// asked, whatever the policy.
func (l *Limiter) Refund(ctx context.Context, charges ...ratelimit.Charge) error {
	charges, err := ratelimit.Normalize(charges)
	if err != nil {
		return err
	}
	_, err = l.bounded(ctx, func(ctx context.Context) ([]int64, error) {
		return l.ask(ctx, l.refund, charges, nil, refundArgs)
	})
	return err
}

// observed decides, applies the policy and reports.
func (l *Limiter) observed(ctx context.Context, within time.Duration, charges []ratelimit.Charge) (ratelimit.Decision, error) {
	start := time.Now()
	d, err := l.decision(ctx, within, true, charges)
	if errors.Is(err, ratelimit.ErrUnavailable) {
		if l.cfg.Hooks.OnUnavailable != nil {
			l.cfg.Hooks.OnUnavailable(ctx, err)
		}
		l.count(ctx, start, "unavailable", "")
		if l.cfg.OnUnavailable == Deny {
			return ratelimit.Decision{}, err
		}
		if !l.down.Swap(true) {
			l.cfg.Logger.WarnContext(ctx, "ratelimit: store unavailable, requests pass unmetered", slog.Any("error", err))
		}
		return ratelimit.Decision{Allowed: true, Unmetered: true}, nil
	}
	if err != nil {
		return ratelimit.Decision{}, err
	}
	if l.down.Swap(false) {
		l.cfg.Logger.InfoContext(ctx, "ratelimit: store available again")
	}
	outcome := "allowed"
	if !d.Allowed {
		outcome = "denied"
	}
	l.count(ctx, start, outcome, d.Denied)
	if l.cfg.Hooks.OnDecision != nil {
		l.cfg.Hooks.OnDecision(ctx, d)
	}
	return d, nil
}

func (l *Limiter) count(ctx context.Context, start time.Time, outcome, limit string) {
	labels := metric.WithAttributes(attribute.String("outcome", outcome), attribute.String("limit", limit))
	l.decisions.Add(ctx, 1, labels)
	l.duration.Record(ctx, time.Since(start).Seconds(), metric.WithAttributes(attribute.String("outcome", outcome)))
}

// decision asks the script and works out the details from the state that it
// saw, with the arithmetic that all limiters share.
func (l *Limiter) decision(ctx context.Context, within time.Duration, take bool, charges []ratelimit.Charge) (ratelimit.Decision, error) {
	possible := !slices.ContainsFunc(charges, tooMuch)
	head := []any{0, within.Milliseconds()}
	if take && possible {
		head[0] = 1
	}
	reply, err := l.bounded(ctx, func(ctx context.Context) ([]int64, error) {
		return l.ask(ctx, l.decide, charges, head, decideArgs)
	})
	if err != nil {
		return ratelimit.Decision{}, err
	}
	if len(reply) != 2+2*len(charges) {
		return ratelimit.Decision{}, fmt.Errorf("%w: script answered %d numbers", ratelimit.ErrUnavailable, len(reply))
	}
	counters := make([]ratelimit.Counter, len(charges))
	for i, c := range charges {
		sane := int64(1<<53) / c.Limit.Window.Milliseconds() // whatever a foreign value says
		if c.Limit.Algorithm == ratelimit.TokenBucket {
			sane = 1 << 53
		}
		counters[i] = ratelimit.Counter{Prev: min(reply[2+2*i], sane), Cur: min(reply[3+2*i], sane)}
	}
	d := ratelimit.Decide(time.UnixMilli(reply[0]), within.Truncate(time.Millisecond), charges, counters)
	if possible && d.Allowed != (reply[1] == 1) {
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

// bounded calls ask and returns after Timeout at the latest, also where the
// client does not heed its context: it may then finish on its own time, bounded
// by the client's timeouts.
func (l *Limiter) bounded(ctx context.Context, ask func(ctx context.Context) ([]int64, error)) ([]int64, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	short, cancel := context.WithTimeout(ctx, l.cfg.Timeout)
	type answer struct {
		reply []int64
		err   error
	}
	done := make(chan answer, 1)
	go func() {
		defer cancel()
		reply, err := ask(short)
		done <- answer{reply, err}
	}()
	var a answer
	select {
	case a = <-done:
	case <-short.Done():
		a.err = short.Err()
		select {
		case a = <-done: // it had finished, which is what cancelled the context
		default:
		}
	}
	switch {
	case a.err == nil:
		return a.reply, nil
	case ctx.Err() != nil:
		return nil, ctx.Err()
	}
	return nil, fmt.Errorf("%w: %w", ratelimit.ErrUnavailable, a.err)
}
