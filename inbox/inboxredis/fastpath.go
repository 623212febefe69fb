package inboxredis

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/breaker"
)

const (
	failuresInARow = 3 // open the breaker
	probeEvery     = time.Second
)

var errOpen = errors.New("inboxredis: Redis has not answered of late")

// FastPath is an inbox.Processor that skips, by a look at Redis, what the processor behind it
// has processed before, and leaves everything else to that one, which must deduplicate
// itself (inboxpgx). It saves a transaction per copy, at the price of one round trip to Redis
// per call and one per success, neither longer than Config.Timeout. It is safe for concurrent use.
type FastPath struct {
	p       *Processor
	breaker *breaker.Breaker
}

// NewFastPath returns a FastPath before next. Of cfg it uses all but Lease; the keys are
// those of a Processor with the same Namespace. It does not look at Redis.
func NewFastPath(client redis.UniversalClient, next inbox.Processor, cfg Config) (*FastPath, error) {
	p, err := NewProcessor(client, next, cfg)
	if err != nil {
		return nil, err
	}
	return &FastPath{p: p, breaker: breaker.New(failuresInARow, probeEvery)}, nil
}

// Process implements inbox.Processor. Redis may only say that a message is done; what it does
// not know, or when it does not answer, is for the processor behind.
func (f *FastPath) Process(ctx context.Context, msgs []*inbox.Message) []error {
	done := f.done(ctx, msgs)
	rest, at := make([]*inbox.Message, 0, len(msgs)), make([]int, 0, len(msgs))
	for i, m := range msgs {
		switch {
		case !done[i]:
			rest, at = append(rest, m), append(at, i)
		case f.p.cfg.Hooks.OnDuplicate != nil:
			f.p.cfg.Hooks.OnDuplicate(ctx, m)
		}
	}
	results := make([]error, len(msgs))
	if len(rest) == 0 {
		return results
	}
	answers := f.p.next.Process(ctx, rest)
	if len(answers) != len(rest) {
		err := fmt.Errorf("inboxredis: next Processor returned %d results for %d messages", len(answers), len(rest))
		for _, i := range at {
			results[i] = err
		}
		return results
	}
	for k, err := range answers {
		results[at[k]] = err
	}
	f.mark(ctx, rest, answers)
	return results
}

// done asks for all messages in one round trip.
func (f *FastPath) done(ctx context.Context, msgs []*inbox.Message) []bool {
	done := make([]bool, len(msgs))
	asked := make([]*redis.StringCmd, len(msgs))
	pipe := f.p.client.Pipeline()
	for i, m := range msgs {
		if m.Validate() == nil {
			asked[i] = pipe.Get(ctx, f.p.prefix+m.ID.String())
		}
	}
	if pipe.Len() == 0 {
		return done
	}
	if err := f.exec(ctx, pipe, f.p.prefix+msgs[0].ID.String()); err != nil {
		f.p.cfg.Logger.DebugContext(ctx, "inbox: Redis not asked for messages", slog.Any("error", err))
		return done
	}
	for i, answer := range asked {
		if answer == nil {
			continue
		}
		value, err := answer.Result()
		switch {
		case err == nil:
			done[i] = !processing(value)
		case redis.HasErrorPrefix(err, "WRONGTYPE"): // another system's mark
			done[i] = true
		case !errors.Is(err, redis.Nil):
			f.p.cfg.Logger.DebugContext(ctx, "inbox: Redis not asked for a message", slog.Any("id", msgs[i].ID), slog.Any("error", err))
		}
	}
	return done
}

// mark notes what was processed. Without its mark a copy costs the transaction again.
func (f *FastPath) mark(ctx context.Context, msgs []*inbox.Message, answers []error) {
	ctx = context.WithoutCancel(ctx)
	pipe := f.p.client.Pipeline()
	for i, m := range msgs {
		if answers[i] == nil {
			pipe.SetArgs(ctx, f.p.prefix+m.ID.String(), doneMark, redis.SetArgs{Mode: "NX", TTL: f.p.cfg.TTL})
		}
	}
	if pipe.Len() == 0 {
		return
	}
	if err := f.exec(ctx, pipe, f.p.prefix+msgs[0].ID.String()); err != nil {
		f.p.cfg.Logger.DebugContext(ctx, "inbox: processed messages not marked in Redis", slog.Any("error", err))
	}
}

// exec runs the commands, each of which keeps its own error, and returns an error unless Redis
// has answered in time. The client need not mind the deadline (redis.Options.ContextTimeoutEnabled),
// so a call is left behind, and its commands must not be looked at then. key is one of theirs.
func (f *FastPath) exec(ctx context.Context, pipe redis.Pipeliner, key string) error {
	if !f.breaker.Enter() {
		return errOpen
	}
	within, cancel := context.WithTimeout(ctx, f.p.cfg.Timeout)
	defer cancel() // not before the answer is taken
	answers := make(chan error, 1)
	go func() {
		_, err := pipe.Exec(within)
		answers <- err
	}()
	var err error
	select {
	case err = <-answers:
	case <-within.Done():
		err = within.Err()
	}
	if _, answered := errors.AsType[redis.Error](err); answered {
		err = nil
	}
	if ctx.Err() == nil { // else nobody waited for the answer
		f.breaker.Done(err == nil)
		if err != nil {
			f.p.idle.Test(ctx, key)
		}
	}
	return err
}
