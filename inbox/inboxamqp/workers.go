package inboxamqp

import (
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/internal/base"
	"github.com/holdfast-go/holdfast/inbox/internal/blame"
)

// returnPause is how long a message stays away that came back for no reason the consumer knows.
const returnPause = time.Second

// workers process deliveries and settle each by what became of it. They outlive the sessions.
type workers struct {
	cfg      *settings
	life     *lifetime
	calls    *calls
	attempts *attempts
	mover    *mover

	jobs     chan []*delivery
	running  sync.WaitGroup
	suspects blame.Suspects
	clock    atomic.Uint64 // tells which message began or failed before another
}

// close takes no more jobs; idle is closed when all workers have ended.
func (w *workers) close() (idle <-chan struct{}) {
	close(w.jobs)
	ended := make(chan struct{})
	go func() {
		w.running.Wait()
		close(ended)
	}()
	return ended
}

// work is one worker. It is followed by another one when a handler exits its goroutine.
func (w *workers) work() {
	ended := false
	defer func() {
		if !ended {
			w.running.Go(w.work)
		}
	}()
	for ds := range w.jobs {
		w.handle(ds)
	}
	ended = true
}

// handle processes the deliveries of one hand-over and settles them. Those that have failed
// before, or are suspected of ending the process or the connection, are processed one by
// one, after the others: those must not wait for them.
func (w *workers) handle(ds []*delivery) {
	var batch, single []*delivery
	for _, d := range ds {
		if len(ds) == 1 || d.wait > 0 || d.msg.Attempt > 1 || w.attempts.tracks(d) || w.suspects.Has(d.msg.ID) {
			single = append(single, d)
		} else {
			d.batched = true
			batch = append(batch, d)
		}
	}
	defer w.each(single)
	if len(batch) > 0 {
		w.together(batch)
	}
}

// each handles deliveries one by one, the others also when a handler exits the goroutine.
func (w *workers) each(ds []*delivery) {
	if len(ds) == 0 {
		return
	}
	defer w.each(ds[1:])
	w.one(ds[0])
}

// one handles a single delivery.
func (w *workers) one(d *delivery) {
	switch {
	case d.wait > 0:
		d.report(probed{available: true})
		w.mover.passOn(d)
	case w.attempts.tracks(d):
		w.tracked(d)
	default:
		w.together([]*delivery{d})
	}
}

// together has deliveries processed in one call and settles them.
func (w *workers) together(ds []*delivery) {
	release := w.attempts.turns.share()
	results := same(len(ds), errExited)
	defer func() {
		release()
		w.concludeAll(ds, results)
	}()
	w.process(ds, results)
}

// tracked has a message processed with the help of the ledger.
func (w *workers) tracked(d *delivery) {
	entry, err := w.attempts.look(d.msg)
	open := entry.OpenRuns(d.msg)
	switch {
	case err != nil:
		w.conclude(d, inbox.Unavailable(err))
		return
	case entry.Supersedes(d.msg):
		w.cfg.Logger.Info("leftover of an earlier attempt dropped", slog.Any("message_id", d.msg.ID), slog.Int("attempt", d.msg.Attempt))
		d.report(probed{available: true})
		d.acknowledge(superseded)
		return
	case open >= w.cfg.MaxCrashes && d.msg.Redelivered: // else the runs may be those of other copies, in progress
		w.conclude(d, inbox.Classed(inbox.Unrecoverable(fmt.Errorf(
			"inboxamqp: the process ended %d times while this message was being processed", open)), driver.ClassQuarantined))
		return
	}
	// The turn is over before the message is settled: that may wait for the broker.
	err = errExited
	defer func() { w.conclude(d, err) }()
	err = w.attempts.run(d, open > 0, func(results []error) { w.process([]*delivery{d}, results) })
}

// process calls the processor and fills in the results.
func (w *workers) process(ds []*delivery, results []error) {
	began := w.clock.Add(1)
	msgs := make([]*inbox.Message, len(ds))
	for i, d := range ds {
		d.began, msgs[i] = began, d.msg
	}
	w.calls.process(msgs, results)
}

// concludeAll settles deliveries that were processed together.
func (w *workers) concludeAll(ds []*delivery, results []error) {
	if len(ds) == 1 {
		w.conclude(ds[0], results[0])
		return
	}
	var done []*delivery
	var failed sync.WaitGroup
	for i, d := range ds {
		if results[i] == nil {
			d.evidence.passed(d.began)
			done = append(done, d)
		}
	}
	acknowledge(done, acked)
	for i, d := range ds {
		if results[i] != nil {
			failed.Go(func() { w.conclude(d, results[i]) })
		}
	}
	failed.Wait()
}

// conclude settles a delivery by the processor's answer.
func (w *workers) conclude(d *delivery, err error) {
	failure := driver.Classify(err)
	if failure.Unavailable {
		logFailure(w.cfg.Logger, d, failure, driver.Decision{Action: failure.Action})
		d.evidence.unavailable(d, failure)
		d.report(probed{})
		return
	}
	if err == nil {
		d.evidence.passed(d.began)
	}
	d.report(probed{available: true, passed: err == nil})
	w.settle(d, failure)
}

// settle settles a delivery by what became of it.
func (w *workers) settle(d *delivery, failure driver.Failure) {
	w.suspects.Clear(d.msg.ID)
	if failure.Err == nil {
		d.acknowledge(acked)
		w.attempts.concluded(d, failure, driver.Decision{})
		return
	}
	now := time.Now()
	decision := driver.Next(w.cfg.Retry, d.msg, failure, now, w.cfg.Rand())
	logFailure(w.cfg.Logger, d, failure, decision)
	noted := func() { w.attempts.concluded(d, failure, decision) }
	switch decision.Action {
	case driver.ActionRetry:
		w.mover.retry(d, decision, now, noted)
	case driver.ActionDead:
		w.mover.bury(d, driver.NewDeadLetter(d.msg, failure, w.cfg.Name, now), noted)
	default:
		noted()
		w.returned(d)
	}
}

// returned deals with a message that comes again uncounted. Outside a drain, which gives all back
// as it was, it must neither make a hot loop nor keep the others waiting.
func (w *workers) returned(d *delivery) {
	if w.life.stop.Err() != nil {
		d.giveBack()
		return
	}
	w.mover.attend(d, func() { w.mover.later(d, returnPause, true) })
}

func logFailure(logger *slog.Logger, d *delivery, f driver.Failure, decision driver.Decision) {
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
	logger.Warn("message not processed", attrs...)
}
