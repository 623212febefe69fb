package inboxtest

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/internal/base"
	"github.com/holdfast-go/holdfast/internal/ids"
)

func (c *Consumer) deliver(ctx context.Context, ds []*delivery) {
	var at, lost []*delivery
	var msgs []*inbox.Message
	for _, d := range ds {
		c.derive(d.msg)
		msg := clone(d.msg) // a handler that changes its message changes no later delivery
		if c.cfg.Crash(BeforeProcess, msg) {
			lost = append(lost, d)
			continue
		}
		at, msgs = append(at, d), append(msgs, msg)
	}
	for i, err := range c.process(ctx, msgs) {
		switch {
		case c.cfg.Crash(BeforeSettle, msgs[i]):
			lost = append(lost, at[i])
		case err != nil:
			c.failed(ctx, at[i], err)
		default:
			c.done(at[i])
		}
	}
	for _, d := range slices.Backward(lost) { // in front of the queue, in their order
		c.giveBack(d)
	}
}

// process has those messages processed that the processor may be given.
func (c *Consumer) process(ctx context.Context, msgs []*inbox.Message) []error {
	results := make([]error, len(msgs))
	var good []*inbox.Message
	var at []int
	for i, m := range msgs {
		if results[i] = c.acceptable(m); results[i] == nil {
			good, at = append(good, m), append(at, i)
		}
	}
	for k, err := range c.call(ctx, good) {
		if err != nil && errors.Is(context.Cause(ctx), inbox.ErrDraining) {
			err = fmt.Errorf("%w: %w", inbox.ErrDraining, err)
		}
		results[at[k]] = err
	}
	return results
}

// derive sets the id of a message that has none, as Config.DeriveID says.
func (c *Consumer) derive(m *inbox.Message) {
	if c.cfg.DeriveID == nil || ids.Check(m.ID) == nil {
		return
	}
	defer func() {
		if recover() != nil {
			m.ID = uuid.Nil // refused
		}
	}()
	m.ID = c.cfg.DeriveID(m)
}

// acceptable refuses what no consumer gives to its processor.
func (c *Consumer) acceptable(m *inbox.Message) error {
	if err := m.Validate(); err != nil {
		return err
	}
	if len(m.Body) > c.maxBody {
		return inbox.Invalid(fmt.Errorf("inboxtest: body of %d bytes, at most %d are allowed", len(m.Body), c.maxBody))
	}
	return nil
}

// call runs the processor on a goroutine of its own, so that one that exits it, as t.FailNow does,
// fails its messages and not the consumer.
func (c *Consumer) call(ctx context.Context, msgs []*inbox.Message) []error {
	if len(msgs) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, time.Duration(len(msgs))*c.cfg.HandlerTimeout)
	defer cancel()
	results := same(len(msgs), errors.New("inboxtest: processor exited its goroutine"))
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			if v := recover(); v != nil {
				results = same(len(msgs), &base.Panic{Value: v, Stack: debug.Stack()})
			}
		}()
		answers := c.processor.Process(ctx, msgs)
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
func (c *Consumer) done(d *delivery) {
	c.passed(d)
	c.settle(func(q *queue) {
		if c.cfg.DeliverTwice && !d.repeated {
			d.repeated, d.msg.Redelivered = true, true
			q.ready = append(q.ready, d)
		}
	})
}

// giveBack puts a message where it was.
func (c *Consumer) giveBack(d *delivery) {
	c.settle(func(q *queue) {
		d.msg.Redelivered = true
		q.ready = slices.Insert(q.ready, 0, d)
	})
}

func (c *Consumer) failed(ctx context.Context, d *delivery, err error) {
	failure := driver.Classify(err)
	if failure.Unavailable {
		c.log(ctx, d.msg, failure, driver.Decision{Action: failure.Action})
		c.unavailable(d, failure)
		return
	}
	c.suspects.Clear(d.msg.ID)
	c.conclude(ctx, d, failure)
}

// conclude settles a message that failed.
func (c *Consumer) conclude(ctx context.Context, d *delivery, failure driver.Failure) {
	now := time.Now()
	decision := driver.Next(c.cfg.Retry, d.msg, failure, now, c.cfg.Rand())
	c.log(ctx, d.msg, failure, decision)
	switch decision.Action {
	case driver.ActionReturn:
		c.giveBack(d)
	case driver.ActionDead:
		c.settle(func(q *queue) { q.bury(driver.NewDeadLetter(d.msg, failure, c.cfg.Name, now)) })
	default:
		c.settle(func(*queue) { c.retry(d, decision, now) })
	}
}

// retry is called with the lock held.
func (c *Consumer) retry(d *delivery, decision driver.Decision, now time.Time) {
	if decision.Counted {
		d.msg.Attempt++
		if decision.Recovered {
			d.msg.Recovered++
		}
		if d.msg.FirstFailedAt.IsZero() {
			d.msg.FirstFailedAt = now
		}
	}
	c.later(d, decision.Delay)
}

// settle ends a delivery with a change to the queue.
func (c *Consumer) settle(change func(q *queue)) {
	c.broker.change(func() {
		c.queue.inFlight--
		change(c.queue)
	})
}

func (c *Consumer) pause() {
	c.broker.change(func() { c.paused++ })
	time.AfterFunc(pauseTime, func() { c.broker.change(func() { c.paused-- }) })
}

func (c *Consumer) log(ctx context.Context, m *inbox.Message, f driver.Failure, d driver.Decision) {
	args := []any{
		"queue", m.Queue, "id", m.ID, "name", m.Name, "attempt", m.Attempt,
		"action", d.Action.String(), "delay", d.Delay, "class", f.Class, "error", f.Err,
	}
	if caught, ok := errors.AsType[*base.Panic](f.Err); ok {
		args = append(args, "stack", string(caught.Stack))
	}
	c.cfg.Logger.WarnContext(ctx, "inbox: message not processed", args...)
}
