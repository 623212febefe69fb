package inboxtest

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/internal/base"
)

// Run delivers until ctx ends. Then it takes no further message, lets those in hand finish
// for ShutdownTimeout, cancels their context with inbox.ErrDraining, and returns nil when
// their handlers have returned. What was not finished is in the queue for the next Run.
// Several may run at once.
func (b *Broker) Run(ctx context.Context) error {
	defer context.AfterFunc(ctx, b.wake)()
	b.addRunning(1)
	defer b.addRunning(-1)

	work, release := b.workContext(ctx)
	defer release()
	var workers sync.WaitGroup
	for range b.cfg.Concurrency {
		workers.Go(func() {
			for ds := b.take(ctx); ds != nil; ds = b.take(ctx) {
				b.deliver(work, ds)
			}
		})
	}
	workers.Wait()
	return nil
}

func (b *Broker) addRunning(n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.running += n
}

// workContext outlives ctx by the shutdown timeout.
func (b *Broker) workContext(ctx context.Context) (work context.Context, release func()) {
	work, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	var timer *time.Timer
	var mu sync.Mutex
	stop := context.AfterFunc(ctx, func() {
		mu.Lock()
		defer mu.Unlock()
		timer = time.AfterFunc(b.cfg.ShutdownTimeout, func() { cancel(inbox.ErrDraining) })
	})
	return work, func() {
		stop()
		mu.Lock()
		defer mu.Unlock()
		if timer != nil {
			timer.Stop()
		}
		cancel(nil)
	}
}

func (b *Broker) deliver(ctx context.Context, ds []*delivery) {
	var at, lost []*delivery
	var msgs []*inbox.Message
	for _, d := range ds {
		msg := clone(d.msg) // a handler that changes its message changes no later delivery
		if b.cfg.Crash(BeforeProcess, msg) {
			lost = append(lost, d)
			continue
		}
		at, msgs = append(at, d), append(msgs, msg)
	}
	for i, err := range b.process(ctx, msgs) {
		switch {
		case b.cfg.Crash(BeforeSettle, msgs[i]):
			lost = append(lost, at[i])
		case err != nil:
			b.failed(ctx, at[i], err)
		default:
			b.done(at[i])
		}
	}
	for _, d := range slices.Backward(lost) { // in front of the queue, in their order
		b.giveBack(d)
	}
}

// process has those messages processed that the processor may be given.
func (b *Broker) process(ctx context.Context, msgs []*inbox.Message) []error {
	results := make([]error, len(msgs))
	var good []*inbox.Message
	var at []int
	for i, m := range msgs {
		if results[i] = b.acceptable(m); results[i] == nil {
			good, at = append(good, m), append(at, i)
		}
	}
	for k, err := range b.call(ctx, good) {
		if err != nil && errors.Is(context.Cause(ctx), inbox.ErrDraining) {
			err = fmt.Errorf("%w: %w", inbox.ErrDraining, err)
		}
		results[at[k]] = err
	}
	return results
}

// acceptable refuses what no consumer gives to its processor.
func (b *Broker) acceptable(m *inbox.Message) error {
	if err := m.Validate(); err != nil {
		return err
	}
	if most := b.cfg.MaxBodyBytes; len(m.Body) > most {
		return inbox.Invalid(fmt.Errorf("inboxtest: body of %d bytes, at most %d are allowed", len(m.Body), most))
	}
	return nil
}

// call runs the processor on a goroutine of its own, so that one that exits it, as t.FailNow does,
// fails its messages and not the broker.
func (b *Broker) call(ctx context.Context, msgs []*inbox.Message) []error {
	if len(msgs) == 0 {
		return nil
	}
	results := same(len(msgs), errors.New("inboxtest: processor exited its goroutine"))
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			if v := recover(); v != nil {
				results = same(len(msgs), &base.Panic{Value: v, Stack: debug.Stack()})
			}
		}()
		answers := b.processor.Process(ctx, msgs)
		if len(answers) != len(msgs) {
			answers = same(len(msgs), fmt.Errorf("inboxtest: processor returned %d results for %d messages", len(answers), len(msgs)))
		}
		results = answers
	}()
	<-done
	return results
}

func same(n int, err error) []error { return slices.Repeat([]error{err}, n) }

// done acknowledges a message.
func (b *Broker) done(d *delivery) {
	b.passed(d)
	b.settle(func() {
		if b.cfg.DeliverTwice && !d.last {
			d.last, d.msg.Redelivered = true, true
			b.ready = append(b.ready, d)
		}
	})
}

// giveBack puts a message where it was.
func (b *Broker) giveBack(d *delivery) {
	b.settle(func() {
		d.msg.Redelivered = true
		b.ready = slices.Insert(b.ready, 0, d)
	})
}

func (b *Broker) failed(ctx context.Context, d *delivery, err error) {
	failure := driver.Classify(err)
	if failure.Unavailable {
		b.log(ctx, d.msg, failure, driver.Decision{Action: failure.Action})
		b.unavailable(d, failure)
		return
	}
	b.suspects.Clear(d.msg.ID)
	b.conclude(ctx, d, failure)
}

// conclude settles a message that failed.
func (b *Broker) conclude(ctx context.Context, d *delivery, failure driver.Failure) {
	now := time.Now()
	decision := driver.Next(b.cfg.Retry, d.msg, failure, now, b.cfg.Rand())
	b.log(ctx, d.msg, failure, decision)
	switch decision.Action {
	case driver.ActionReturn:
		b.giveBack(d)
	case driver.ActionDead:
		b.settle(func() { b.dead.add(driver.NewDeadLetter(d.msg, failure, b.cfg.Consumer, now)) })
	default:
		b.settle(func() { b.retry(d, decision, now) })
	}
}

// retry is called with the lock held.
func (b *Broker) retry(d *delivery, decision driver.Decision, now time.Time) {
	if decision.Counted {
		d.msg.Attempt++
		if decision.Recovered {
			d.msg.Recovered++
		}
		if d.msg.FirstFailedAt.IsZero() {
			d.msg.FirstFailedAt = now
		}
	}
	b.later(d, decision.Delay)
}

func (b *Broker) pause() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.paused++
	time.AfterFunc(b.cfg.Pause, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.paused--
		b.changed.Broadcast()
	})
}

func (b *Broker) log(ctx context.Context, m *inbox.Message, f driver.Failure, d driver.Decision) {
	args := []any{
		"queue", m.Queue, "id", m.ID, "name", m.Name, "attempt", m.Attempt,
		"action", d.Action.String(), "delay", d.Delay, "class", f.Class, "error", f.Err,
	}
	if caught, ok := errors.AsType[*base.Panic](f.Err); ok {
		args = append(args, "stack", string(caught.Stack))
	}
	b.cfg.Logger.WarnContext(ctx, "inbox: message not processed", args...)
}
