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
	"github.com/holdfast-go/holdfast/internal/redisconn"
)

const (
	// shortcutTimeout is how long the shortcut waits for Redis before it does without. After
	// failuresInARow answers that did not come it asks once a second only, so that a Redis that
	// hangs delays hardly any message. It may be short: where Redis is late nothing fails, and the message
	// costs its transaction.
	shortcutTimeout = 100 * time.Millisecond
	failuresInARow  = 3
	probeEvery      = time.Second
)

var errOpen = errors.New("inboxredis: Redis has not answered of late")

// shortcut skips, by a look at Redis, what the processor behind has processed before, and leaves
// everything else to that one. It saves a transaction per copy, at the price of one round trip to
// Redis per call and one per success.
type shortcut struct {
	p       *Processor
	timeout time.Duration // for an answer of Redis
	breaker *breaker.Breaker
}

func newShortcut(p *Processor) *shortcut {
	return &shortcut{p: p, timeout: shortcutTimeout, breaker: breaker.New(failuresInARow, probeEvery)}
}

// process believes Redis only when it says that a message is done; what it does not know, or when
// it does not answer, is for the processor behind.
func (s *shortcut) process(ctx context.Context, msgs []*inbox.Message) []error {
	done := s.done(ctx, msgs)
	rest, at := make([]*inbox.Message, 0, len(msgs)), make([]int, 0, len(msgs))
	for i, m := range msgs {
		if !done[i] {
			rest, at = append(rest, m), append(at, i)
		}
	}
	results := make([]error, len(msgs))
	if len(rest) == 0 {
		return results
	}
	answers := s.p.next.Process(ctx, rest)
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
	s.mark(ctx, rest, answers)
	return results
}

// done asks for all messages in one round trip.
func (s *shortcut) done(ctx context.Context, msgs []*inbox.Message) []bool {
	done := make([]bool, len(msgs))
	asked := make([]*redis.StringCmd, len(msgs))
	pipe := s.p.client.Pipeline()
	for i, m := range msgs {
		if m.Validate() == nil {
			asked[i] = pipe.Get(ctx, s.p.prefix+m.ID.String())
		}
	}
	if pipe.Len() == 0 {
		return done
	}
	if err := s.exec(ctx, pipe, s.p.prefix+msgs[0].ID.String()); err != nil {
		s.p.cfg.Logger.DebugContext(ctx, "inbox: Redis not asked for messages", slog.Any("error", err))
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
			s.p.cfg.Logger.DebugContext(ctx, "inbox: Redis not asked for a message", slog.Any("id", msgs[i].ID), slog.Any("error", err))
		}
	}
	return done
}

// mark notes what was processed. Without its mark a copy costs the transaction again.
func (s *shortcut) mark(ctx context.Context, msgs []*inbox.Message, answers []error) {
	ctx = context.WithoutCancel(ctx)
	pipe := s.p.client.Pipeline()
	for i, m := range msgs {
		if answers[i] == nil {
			pipe.SetArgs(ctx, s.p.prefix+m.ID.String(), doneMark, redis.SetArgs{Mode: "NX", TTL: s.p.cfg.Retention})
		}
	}
	if pipe.Len() == 0 {
		return
	}
	if err := s.exec(ctx, pipe, s.p.prefix+msgs[0].ID.String()); err != nil {
		s.p.cfg.Logger.DebugContext(ctx, "inbox: processed messages not marked in Redis", slog.Any("error", err))
	}
}

// exec runs the commands, each of which keeps its own error, and returns an error unless Redis
// has answered in time. The client need not mind the deadline (redis.Options.ContextTimeoutEnabled),
// so a call is left behind, and its commands must not be looked at then. key is one of theirs.
func (s *shortcut) exec(ctx context.Context, pipe redis.Pipeliner, key string) error {
	if !s.breaker.Enter() {
		return errOpen
	}
	within, cancel := context.WithTimeout(ctx, s.timeout)
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
		s.breaker.Done(err == nil)
		if err != nil {
			redisconn.Failed(ctx, s.p.client, err)
			s.p.idle.Test(ctx, key)
		}
	}
	return err
}
