package inboxamqp

import (
	"errors"
	"log/slog"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/internal/base"
)

// returnPause is how long a message stays away that came back for no reason the consumer knows.
const returnPause = time.Second

// worker is followed by another one when a handler exits its goroutine.
func (r *run) worker() {
	ended := false
	defer func() {
		if !ended {
			r.workers.Go(r.worker)
		}
	}()
	for ds := range r.jobs {
		r.handle(ds)
	}
	ended = true
}

// handle processes the deliveries of one hand-over and settles them. Those that have failed
// before, or are suspected of ending the process or the connection, are processed one by
// one, after the others: those must not wait for them.
func (r *run) handle(ds []*delivery) {
	var batch, single []*delivery
	for _, d := range ds {
		if len(ds) == 1 || d.wait > 0 || d.msg.Attempt > 1 || r.tracks(d) || r.suspects.Has(d.msg.ID) {
			single = append(single, d)
		} else {
			d.batched = true
			batch = append(batch, d)
		}
	}
	defer r.each(single)
	if len(batch) > 0 {
		r.batch(batch)
	}
}

// each handles deliveries one by one, the others also when a handler exits the goroutine.
func (r *run) each(ds []*delivery) {
	if len(ds) == 0 {
		return
	}
	defer r.each(ds[1:])
	r.one(ds[0])
}

// one handles a single delivery.
func (r *run) one(d *delivery) {
	switch {
	case d.wait > 0:
		d.report(probed{available: true})
		r.delay(d, duplicate(d.raw), d.wait, deferred, func() {})
	case r.tracks(d):
		r.tracked(d)
	default:
		release := r.turns.share()
		results := []error{errExited}
		defer func() {
			release()
			r.conclude(d, results[0])
		}()
		r.process([]*delivery{d}, results)
	}
}

// batch handles deliveries that are processed together.
func (r *run) batch(ds []*delivery) {
	release := r.turns.share()
	results := same(len(ds), errExited)
	defer func() {
		release()
		r.concludeAll(ds, results)
	}()
	r.process(ds, results)
}

// concludeAll settles deliveries that were processed together.
func (r *run) concludeAll(ds []*delivery, results []error) {
	var done []*delivery
	var failed sync.WaitGroup
	for i, d := range ds {
		if results[i] == nil {
			d.s.passed(d.began)
			done = append(done, d)
		}
	}
	acknowledge(done, acked)
	for i, d := range ds {
		if results[i] != nil {
			failed.Go(func() { r.conclude(d, results[i]) })
		}
	}
	failed.Wait()
}

// conclude settles a delivery by the processor's answer.
func (r *run) conclude(d *delivery, err error) {
	failure := driver.Classify(err)
	if failure.Unavailable {
		r.log(d, failure, driver.Decision{Action: failure.Action})
		r.unavailable(d, failure)
		d.report(probed{})
		return
	}
	if err == nil {
		d.s.passed(d.began)
	}
	d.report(probed{available: true, passed: err == nil})
	r.settle(d, failure)
}

// settle settles a delivery by what became of it.
func (r *run) settle(d *delivery, failure driver.Failure) {
	r.suspects.Clear(d.msg.ID)
	if failure.Err == nil {
		d.acknowledge(acked)
		r.concluded(d, failure, driver.Decision{})
		return
	}
	now := time.Now()
	decision := driver.Next(r.c.cfg.Retry, d.msg, failure, now, r.c.cfg.Rand())
	r.log(d, failure, decision)
	noted := func() { r.concluded(d, failure, decision) }
	switch decision.Action {
	case driver.ActionRetry:
		r.delay(d, retryCopy(d.raw, d.msg, decision, now), decision.Delay, retried, noted)
	case driver.ActionDead:
		letter := driver.NewDeadLetter(d.msg, failure, r.c.cfg.Name, now)
		r.move(transfer{d, r.c.cfg.deadLetterQueue(failure.Class), deadCopy(d.raw, letter), dead, noted})
	default:
		noted()
		r.returned(d)
	}
}

// delay moves a message to the retry queue that covers the delay, or the longest one.
func (r *run) delay(d *delivery, copied amqp.Publishing, delay time.Duration, as outcome, confirmed func()) {
	step, rest := driver.Cover(r.c.cfg.Retry, delay)
	setWait(copied, rest)
	r.move(transfer{d, retryQueue(r.c.cfg.queue, step), copied, as, confirmed})
}

// returned deals with a message that comes again uncounted. Outside a drain, which gives all back
// as it was, it must neither make a hot loop nor keep the others waiting.
func (r *run) returned(d *delivery) {
	if r.stop.Err() != nil {
		d.giveBack()
		return
	}
	r.attend(d, func() { r.later(d, returnPause, true) })
}

func (r *run) log(d *delivery, f driver.Failure, decision driver.Decision) {
	attrs := []any{
		"message_id", d.msg.ID, "name", d.msg.Name, "attempt", d.msg.Attempt,
		"class", f.Class, "action", decision.Action.String(), "error", f.Err,
	}
	if decision.Action == driver.ActionRetry {
		attrs = append(attrs, "delay", decision.Delay)
	}
	if panicked, ok := errors.AsType[*base.Panic](f.Err); ok {
		attrs = append(attrs, slog.String("stack", string(panicked.Stack)))
	}
	r.c.cfg.Logger.Warn("message not processed", attrs...)
}
