package inboxamqp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime/debug"
	"slices"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

// keepPause is how long a message is held that could not be moved, or that was given back
// for no reason the consumer knows: neither must make a hot loop.
const keepPause = time.Second

func (r *run) worker() {
	for d := range r.jobs {
		r.handle(d)
	}
}

// handle processes one delivery and settles it.
func (r *run) handle(d *delivery) {
	defer d.leaveIt() // only if nothing below has settled it
	if wait := waitHeader(d.raw, r.c.cfg.Retry.MaxAge); wait > 0 {
		d.report(true)
		r.delay(d, duplicate(d.raw), wait, deferred)
		return
	}
	err := r.process(d)
	failure := inbox.Classify(err)
	d.report(!failure.Unavailable)
	if err == nil {
		d.acknowledge(acked)
		return
	}
	now := time.Now()
	decision := r.c.cfg.Retry.Next(d.msg, failure, now, rand.Float64())
	r.log(d, failure, decision)
	switch decision.Action {
	case inbox.ActionRetry:
		r.delay(d, retryCopy(d.raw, d.msg, decision.Counted, now), decision.Delay, retried)
	case inbox.ActionDead:
		letter := inbox.NewDeadLetter(d.msg, failure, r.c.cfg.Name, now)
		r.move(d, r.deadLetterQueue(failure.Class), deadCopy(d.raw, letter), dead)
	default:
		if !failure.Unavailable { // that one pauses the whole consumer
			_ = runloop.Sleep(r.stop, keepPause) // a drain does not wait
		}
		d.giveBack()
	}
}

// process runs the processor on a message that it can be given.
func (r *run) process(d *delivery) (err error) {
	if err := d.msg.Validate(); err != nil {
		return err
	}
	if most := r.c.cfg.MaxBodyBytes; len(d.msg.Body) > most {
		return inbox.Invalid(fmt.Errorf("inboxamqp: body of %d bytes, at most %d are allowed", len(d.msg.Body), most))
	}
	ctx, end := r.c.signals.span(r.work, d.msg)
	defer func() {
		if err != nil && errors.Is(context.Cause(r.work), inbox.ErrDraining) {
			err = fmt.Errorf("%w: %w", inbox.ErrDraining, err)
		}
		end(err)
	}()
	return r.call(ctx, d.msg)
}

// call runs the processor on a goroutine of its own, so that a handler that exits it with
// runtime.Goexit fails its message and costs no worker.
func (r *run) call(ctx context.Context, m *inbox.Message) error {
	err := errors.New("inboxamqp: the processor exited its goroutine")
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			if v := recover(); v != nil {
				err = &inbox.PanicError{Value: v, Stack: debug.Stack()}
			}
		}()
		results := r.c.processor.Process(ctx, []*inbox.Message{m})
		if len(results) != 1 {
			err = fmt.Errorf("inboxamqp: the processor gave %d results for one message", len(results))
			return
		}
		err = results[0]
	}()
	<-done
	return err
}

// delay moves a message to the retry queue that covers the delay, or the longest one.
func (r *run) delay(d *delivery, copied amqp.Publishing, delay time.Duration, as outcome) {
	step, rest := r.c.cfg.Retry.Cover(delay)
	setWait(copied, rest)
	r.move(d, retryQueue(r.c.cfg.Queue, step), copied, as)
}

// move publishes a copy to a queue and then acknowledges the original. While no copy can
// be published at all, the message waits here, since its handler would have to run again
// for nothing. When the queue does not take it, it is given back after a pause.
func (r *run) move(d *delivery, queue string, copied amqp.Publishing, as outcome) {
	for !d.gone() { // else a copy would be a second one: the broker delivers the original again
		err := r.publish(queue, copied)
		if err == nil {
			d.acknowledge(as)
			return
		}
		r.c.cfg.Logger.Error("message not moved", slog.Any("message_id", d.msg.ID), slog.String("to", queue), slog.Any("error", err))
		stopped := runloop.Sleep(r.stop, keepPause) != nil
		if stopped || !errors.Is(err, amqpconn.ErrUnavailable) && !errors.Is(err, amqpconn.ErrBlocked) {
			d.giveBack()
			return
		}
	}
	d.leaveIt()
}

func (r *run) publish(queue string, copied amqp.Publishing) error {
	// Not the handlers' context: a message that failed in the drain is still moved. The
	// publisher bounds the wait.
	ctx := context.WithoutCancel(r.work)
	err := r.copies.Confirmed(ctx, amqpconn.Out{Key: queue, Message: copied})
	if errors.Is(err, amqpconn.ErrInvalid) {
		err = r.copies.Confirmed(ctx, amqpconn.Out{Key: queue, Message: withoutForeignHeaders(copied)})
	}
	return err
}

// deadLetterQueue is the queue of a class that has one, else that of the default class.
func (r *run) deadLetterQueue(class string) string {
	if !slices.Contains(allClasses(r.c.cfg.Classes), class) {
		class = inbox.ClassDefault
	}
	return inbox.DeadLetterQueue(r.c.cfg.DeadLetterPrefix, class)
}

func (r *run) log(d *delivery, f inbox.Failure, decision inbox.Decision) {
	attrs := []any{
		"message_id", d.msg.ID, "name", d.msg.Name, "attempt", d.msg.Attempt,
		"class", f.Class, "action", decision.Action.String(), "error", f.Err,
	}
	if decision.Action == inbox.ActionRetry {
		attrs = append(attrs, "delay", decision.Delay)
	}
	if panicked, ok := errors.AsType[*inbox.PanicError](f.Err); ok {
		attrs = append(attrs, "stack", string(panicked.Stack))
	}
	r.c.cfg.Logger.Warn("message not processed", attrs...)
}
