package inboxamqp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
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

// process runs the processor on those messages that it can be given, and fills in the results.
func (r *run) process(ds []*delivery, results []error) {
	msgs, at := make([]*inbox.Message, 0, len(ds)), make([]int, 0, len(ds))
	for i, d := range ds {
		if results[i] = r.acceptable(d.msg); results[i] == nil {
			msgs, at = append(msgs, d.msg), append(at, i)
		}
	}
	if len(msgs) == 0 {
		return
	}
	began := r.clock.Add(1)
	for _, i := range at {
		ds[i].began = began
	}
	ctx, end := r.c.signals.span(r.work, msgs)
	answers := same(len(msgs), errExited)
	defer func() {
		draining := errors.Is(context.Cause(r.work), inbox.ErrDraining)
		for i, err := range answers {
			if err != nil && draining {
				err = fmt.Errorf("%w: %w", inbox.ErrDraining, err)
			}
			results[at[i]] = err
		}
		end(answers)
	}()
	r.call(ctx, msgs, answers)
}

func (r *run) acceptable(m *inbox.Message) error {
	if err := m.Validate(); err != nil {
		return err
	}
	if most := r.c.cfg.maxBodyBytes; len(m.Body) > most {
		return inbox.Invalid(fmt.Errorf("inboxamqp: body of %d bytes, at most %d are allowed", len(m.Body), most))
	}
	return nil
}

// call runs the processor and waits for it however long it takes. It reports one that ignores its
// deadline.
func (r *run) call(ctx context.Context, msgs []*inbox.Message, answers []error) {
	limit := r.c.cfg.limit(len(msgs))
	ctx, cancel := context.WithTimeoutCause(ctx, limit, errDeadline)
	defer cancel()
	stuck := time.AfterFunc(limit+stuckGrace, func() {
		r.c.stuck.Add(1)
		r.c.signals.stuck(ctx)
		r.c.cfg.Logger.ErrorContext(ctx, "handler is stuck", slog.Any("message_id", msgs[0].ID), slog.String("name", msgs[0].Name),
			slog.Int("messages", len(msgs)), slog.Duration("for", limit+stuckGrace))
	})
	defer func() {
		if !stuck.Stop() {
			r.c.stuck.Add(-1)
		}
	}()
	defer func() {
		if v := recover(); v != nil {
			copy(answers, same(len(msgs), &base.Panic{Value: v, Stack: debug.Stack()}))
		}
	}()
	results := r.c.processor.Process(ctx, msgs)
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
