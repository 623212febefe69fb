package inboxamqp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/internal/base"
)

// stuckGrace is how long a handler may take to notice that its context was cancelled.
const stuckGrace = 5 * time.Second

// errDeadline is the cause with which Config.HandlerTimeout ends a context.
var errDeadline = errors.New("inboxamqp: HandlerTimeout is over")

// errExited is the result of a message whose handler has ended the goroutine by
// runtime.Goexit. Nothing after the call runs then but deferred functions; so it is in the
// results before the call, and they are read by deferred functions.
var errExited = errors.New("inboxamqp: the processor exited its goroutine")

// calls are those of the processor, each with a deadline and a span.
type calls struct {
	cfg       *settings
	processor inbox.Processor
	signals   *signals
	work      context.Context
	stuck     *atomic.Int64 // handlers that ignore the end of their time
}

// process runs the processor on those messages that it can be given, and fills in the results.
func (c *calls) process(all []*inbox.Message, results []error) {
	at := make([]int, 0, len(all)) // where the messages are that it is given
	for i, m := range all {
		if results[i] = c.acceptable(m); results[i] == nil {
			at = append(at, i)
		}
	}
	if len(at) == 0 {
		return
	}
	msgs := all
	if len(at) < len(all) {
		msgs = make([]*inbox.Message, len(at))
		for k, i := range at {
			msgs[k] = all[i]
		}
	}
	ctx, end := c.signals.span(c.work, msgs)
	answers := same(len(msgs), errExited)
	defer func() {
		draining := errors.Is(context.Cause(c.work), inbox.ErrDraining)
		for i, err := range answers {
			if err != nil && draining {
				err = fmt.Errorf("%w: %w", inbox.ErrDraining, err)
			}
			results[at[i]] = err
		}
		end(answers)
	}()
	c.call(ctx, msgs, answers)
}

func (c *calls) acceptable(m *inbox.Message) error {
	if err := m.Validate(); err != nil {
		return err
	}
	if most := c.cfg.maxBodyBytes; len(m.Body) > most {
		return inbox.Invalid(fmt.Errorf("inboxamqp: body of %d bytes, at most %d are allowed", len(m.Body), most))
	}
	return nil
}

// call blocks until the processor returns, and reports one that overruns its deadline.
func (c *calls) call(ctx context.Context, msgs []*inbox.Message, answers []error) {
	limit := c.cfg.limit(len(msgs))
	ctx, cancel := context.WithTimeoutCause(ctx, limit, errDeadline)
	defer cancel()
	stuck := time.AfterFunc(limit+stuckGrace, func() {
		c.stuck.Add(1)
		c.signals.stuck(ctx)
		c.cfg.Logger.ErrorContext(ctx, "handler is stuck", slog.Any("message_id", msgs[0].ID), slog.String("name", msgs[0].Name),
			slog.Int("messages", len(msgs)), slog.Duration("for", limit+stuckGrace))
	})
	defer func() {
		if !stuck.Stop() {
			c.stuck.Add(-1)
		}
	}()
	defer func() {
		if v := recover(); v != nil {
			copy(answers, same(len(msgs), &base.Panic{Value: v, Stack: debug.Stack()}))
		}
	}()
	results := c.processor.Process(ctx, msgs)
	if len(results) != len(msgs) {
		results = same(len(msgs), fmt.Errorf("inboxamqp: the processor gave %d results for %d messages", len(results), len(msgs)))
	}
	copy(answers, results)
}

func same(n int, err error) []error {
	results := make([]error, n)
	for i := range results {
		results[i] = err
	}
	return results
}
