package inboxamqp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
)

// errDeadline is the cause with which Config.HandlerTimeout ends a context.
var errDeadline = errors.New("inboxamqp: HandlerTimeout is over")

// process runs the processor on those messages that it can be given.
func (r *run) process(ds []*delivery) []error {
	results := make([]error, len(ds))
	msgs, at := make([]*inbox.Message, 0, len(ds)), make([]int, 0, len(ds))
	for i, d := range ds {
		if results[i] = r.acceptable(d.msg); results[i] == nil {
			msgs, at = append(msgs, d.msg), append(at, i)
		}
	}
	if len(msgs) == 0 {
		return results
	}
	ctx, end := r.c.signals.span(r.work, msgs)
	answers := r.call(ctx, msgs)
	draining := errors.Is(context.Cause(r.work), inbox.ErrDraining)
	for i, err := range answers {
		if err != nil && draining {
			err = fmt.Errorf("%w: %w", inbox.ErrDraining, err)
		}
		results[at[i]] = err
	}
	end(answers)
	return results
}

func (r *run) acceptable(m *inbox.Message) error {
	if err := m.Validate(); err != nil {
		return err
	}
	if most := r.c.cfg.MaxBodyBytes; len(m.Body) > most {
		return inbox.Invalid(fmt.Errorf("inboxamqp: body of %d bytes, at most %d are allowed", len(m.Body), most))
	}
	return nil
}

// call runs the processor on a goroutine of its own, so that a handler that exits it with
// runtime.Goexit fails its messages and costs no worker. It waits for that goroutine however
// long it takes; of one that does not mind its deadline it tells.
func (r *run) call(ctx context.Context, msgs []*inbox.Message) []error {
	patience := r.c.cfg.AckTimeout / 2
	if limit := time.Duration(len(msgs)) * r.c.cfg.HandlerTimeout; limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, limit, errDeadline)
		defer cancel()
		patience = limit + stuckGrace
	}
	results := same(len(msgs), errors.New("inboxamqp: the processor exited its goroutine"))
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			if v := recover(); v != nil {
				results = same(len(msgs), &inbox.PanicError{Value: v, Stack: debug.Stack()})
			}
		}()
		answers := r.c.processor.Process(ctx, msgs)
		if len(answers) != len(msgs) {
			answers = same(len(msgs), fmt.Errorf("inboxamqp: the processor gave %d results for %d messages", len(answers), len(msgs)))
		}
		results = answers
	}()
	stuck := time.AfterFunc(patience, func() {
		r.c.signals.stuck(ctx)
		r.c.cfg.Logger.ErrorContext(ctx, "handler is stuck", slog.Any("message_id", msgs[0].ID), slog.String("name", msgs[0].Name),
			slog.Int("messages", len(msgs)), slog.Duration("for", patience))
	})
	<-done
	stuck.Stop()
	return results
}

func same(n int, err error) []error {
	results := make([]error, n)
	for i := range results {
		results[i] = err
	}
	return results
}
