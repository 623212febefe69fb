package engine

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/internal/base"
)

// workers run jobs, each with a deadline and a span, and post them back. They outlive the sessions.
type workers struct {
	cfg       *settings
	processor inbox.Processor
	signals   *signals
	tracker   *tracker
	ctx       context.Context // of the handlers
	jobs      chan *job
	post      func(event)
	running   sync.WaitGroup

	late error // the cause with which HandlerTimeout ends a context

	// exited is the result of a message whose handler has ended the goroutine by runtime.Goexit.
	// Nothing after the call runs then but deferred functions; so it is in the results before the
	// call, and they are read by deferred functions.
	exited error
}

func (w *workers) start() {
	w.late, w.exited = w.cfg.errorf("HandlerTimeout is over"), w.cfg.errorf("the processor exited its goroutine")
	for range w.cfg.Concurrency {
		w.running.Go(w.work)
	}
}

// work is one worker. It is followed by another one when a handler exits its goroutine.
func (w *workers) work() {
	ended := false
	defer func() {
		if !ended {
			w.running.Go(w.work)
		}
	}()
	for j := range w.jobs {
		w.run(j)
	}
	ended = true
}

// run runs a job and posts it with what became of its messages.
func (w *workers) run(j *job) {
	defer w.cfg.Solo.enter(w.ctx, j.alone)()
	for range j.msgs {
		j.errs = append(j.errs, w.exited)
	}
	defer func() {
		w.judge(j)
		w.post(event{kind: finished, job: j})
	}()
	if !j.tracked {
		w.process(w.ctx, j.msgs, j.errs)
		return
	}
	if !j.asked {
		var f *fate
		var err error
		if j.msgs[0], f, err = w.tracker.look(j.msgs[0], j.alone); f != nil || err != nil {
			j.fates, j.errs[0] = []*fate{f}, err
			return
		}
	}
	w.tracked(j.msgs[0], j.errs)
}

// tracked has a message processed, its beginning and its end noted.
func (w *workers) tracked(m *inbox.Message, errs []error) {
	if err := w.tracker.start(m); err != nil {
		errs[0] = err
		return
	}
	defer func() { w.tracker.end(m, errs[0] == nil) }()
	w.process(w.ctx, []*inbox.Message{m}, errs)
}

// judge reads what the messages of a job have failed with.
func (w *workers) judge(j *job) {
	for i, err := range j.errs {
		if err == nil {
			continue
		}
		if j.fates == nil {
			j.fates = make([]*fate, len(j.errs))
		}
		j.fates[i] = judge(w.cfg, j.msgs[i], err, time.Now())
		logFailure(w.cfg, j.msgs[i], j.fates[i])
	}
}

// process runs the processor on those messages that it can be given, and fills in the results.
func (w *workers) process(ctx context.Context, all []*inbox.Message, results []error) {
	refused := 0
	for i, m := range all {
		if results[i] = w.acceptable(m); results[i] != nil {
			refused++
		}
	}
	if refused == len(all) {
		return
	}
	msgs, at := all, []int(nil)
	if refused > 0 {
		msgs = make([]*inbox.Message, 0, len(all)-refused)
		for i, m := range all {
			if results[i] == nil {
				msgs, at = append(msgs, m), append(at, i)
			}
		}
	}
	answers := results
	if at != nil {
		answers = make([]error, len(msgs))
	}
	for i := range answers {
		answers[i] = w.exited
	}
	ctx, end := w.signals.span(ctx, msgs)
	stop := w.signals.clock(ctx)
	defer func() {
		stop()
		draining := errors.Is(context.Cause(w.ctx), inbox.ErrDraining)
		for i, err := range answers {
			if err != nil && draining {
				answers[i] = fmt.Errorf("%w: %w", inbox.ErrDraining, err)
			}
			if at != nil {
				results[at[i]] = answers[i]
			}
		}
		end(answers)
	}()
	w.call(ctx, msgs, answers)
}

func (w *workers) acceptable(m *inbox.Message) error {
	if err := m.Validate(); err != nil {
		return err
	}
	if most := w.cfg.MaxBodyBytes; len(m.Body) > most {
		return inbox.Invalid(w.cfg.errorf("body of %d bytes, at most %d are allowed", len(m.Body), most))
	}
	return nil
}

// call blocks until the processor returns.
func (w *workers) call(ctx context.Context, msgs []*inbox.Message, answers []error) {
	ctx, cancel := context.WithTimeoutCause(ctx, w.cfg.limit(len(msgs)), w.late)
	defer cancel()
	if len(msgs) > 1 {
		ctx = base.WithHandlerTimeout(ctx, w.cfg.HandlerTimeout)
	}
	defer func() {
		if v := recover(); v != nil {
			copy(answers, same(len(msgs), &base.Panic{Value: v, Stack: debug.Stack()}))
		}
	}()
	results := w.processor.Process(ctx, msgs)
	if len(results) != len(msgs) {
		results = same(len(msgs), w.cfg.errorf("the processor gave %d results for %d messages", len(results), len(msgs)))
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
