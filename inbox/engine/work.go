package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/internal/base"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

// workers run jobs, each with a deadline and a span, and post them back. They outlive the sessions.
type workers struct {
	cfg       *settings
	processor inbox.Processor
	meters    *instruments
	tracker   *tracker
	ctx       context.Context // of the handlers
	jobs      chan *job
	post      func(event)
	running   sync.WaitGroup

	late error // the cause of a context cancelled by HandlerTimeout

	// exited is the result of a message whose handler ended the goroutine by runtime.Goexit. After that only
	// deferred functions run. So exited is put into the results before the call, and deferred functions read
	// them.
	exited error
}

func (w *workers) start() {
	w.late, w.exited = w.cfg.errorf("HandlerTimeout exceeded"), w.cfg.errorf("the processor exited its goroutine")
	for range w.cfg.Concurrency {
		w.running.Go(w.work)
	}
}

// work is one worker. If a handler exits its goroutine, another worker replaces it.
func (w *workers) work() {
	returned := false
	defer func() {
		if !returned {
			w.running.Go(w.work)
		}
	}()
	for j := range w.jobs {
		w.run(j)
	}
	returned = true
}

// run runs a job and posts it with the outcomes of its messages.
func (w *workers) run(j *job) {
	defer w.cfg.Solo.enter(w.ctx, j.alone)()
	for range j.msgs {
		j.errs = append(j.errs, w.exited)
	}
	defer func() {
		w.judge(j)
		w.post(event{kind: finished, job: j})
	}()
	if j.ledger == untracked {
		j.ran = true
		w.process(w.ctx, j.msgs, j.errs)
		return
	}
	if j.ledger == tracked {
		var o *outcome
		var err error
		if j.msgs[0], o, err = w.tracker.read(j.msgs[0]); o != nil || err != nil {
			j.outcomes, j.errs[0] = []*outcome{o}, err
			return
		}
	}
	m := j.msgs[0]
	if err := w.tracker.start(m); err != nil {
		j.errs[0] = err
		return
	}
	defer func() { w.tracker.end(m, j.errs[0] == nil) }()
	j.ran = true
	w.process(w.ctx, []*inbox.Message{m}, j.errs)
}

// judge converts the errors of a job into outcomes.
func (w *workers) judge(j *job) {
	for i, err := range j.errs {
		if err == nil {
			continue
		}
		if j.outcomes == nil {
			j.outcomes = make([]*outcome, len(j.errs))
		}
		j.outcomes[i] = judge(w.cfg, j.msgs[i], err, time.Now())
		logFailure(w.cfg, j.msgs[i], j.outcomes[i])
	}
}

// process runs the processor on the valid messages, and fills in the results.
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
	ctx, end := w.meters.span(ctx, msgs)
	stop := w.meters.clock(ctx)
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
		return inbox.Invalid(w.cfg.errorf("body has %d bytes, at most %d are allowed", len(m.Body), most))
	}
	return nil
}

// call runs the processor and waits for it.
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
		results = same(len(msgs), w.cfg.errorf("the processor returned %d results for %d messages", len(results), len(msgs)))
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

// Solo is shared by consumers that run in one process. A message that may have ended the process runs alone
// in all of them. The zero value is ready for use.
type Solo struct {
	mu      sync.Mutex
	running int           // jobs
	crasher bool          // a running job may have ended the process
	waiting int           // jobs that may have ended the process and wait for the others to end
	changed chan struct{} // closed when one of these changes; nil: nobody waits
}

// enter waits until a job may start beside the running ones, for soloPatience at most, or until ctx ends.
// Calling leave ends the job. A nil Solo never waits.
func (s *Solo) enter(ctx context.Context, crasher bool) (leave func()) {
	if s == nil {
		return func() {}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if crasher {
		s.waiting++
	}
	s.await(ctx, func() bool {
		if crasher {
			return s.running == 0
		}
		return !s.crasher && s.waiting == 0
	})
	if crasher {
		s.waiting--
		s.crasher = true
	}
	s.running++
	return func() { s.leave(crasher) }
}

// await waits, with the lock held, until free returns true or the time is over.
func (s *Solo) await(ctx context.Context, free func() bool) {
	if free() {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, soloPatience)
	defer cancel()
	for !free() && ctx.Err() == nil {
		if s.changed == nil {
			s.changed = make(chan struct{})
		}
		changed := s.changed
		s.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
		}
		s.mu.Lock()
	}
}

func (s *Solo) leave(crasher bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running--
	if crasher {
		s.crasher = false
	}
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
}

// tracker records in the ledger the runs of messages after their first delivery. Workers and movers use it.
type tracker struct {
	cfg  *settings
	work context.Context // ends with the run, so that the drain can still use the ledger
	open sync.Map        // messages whose run is open in the ledger
}

// read reads the entry of a message and decides whether it may run. It returns the message to process, or an
// outcome: it is outdated, or must run alone.
func (t *tracker) read(m *inbox.Message) (*inbox.Message, *outcome, error) {
	var entry driver.LedgerEntry
	err := t.note(func(ctx context.Context, l driver.Ledger) (err error) {
		entry, err = l.Look(ctx, m.ID)
		return err
	})
	open := entry.OpenRuns(m)
	switch {
	case err != nil:
		return m, nil, inbox.Unavailable(err)
	case t.outdated(entry, m):
		t.cfg.Logger.Info("dropped an outdated copy", slog.Any("message_id", m.ID), slog.Int("attempt", m.Attempt))
		return m, &outcome{kind: outdated}, nil
	case open >= t.cfg.MaxCrashes && m.Redelivered: // otherwise the runs may belong to other copies, in progress
		return m, nil, inbox.Classed(inbox.Unrecoverable(fmt.Errorf(
			"%s: the process ended %d times while this message was being processed", t.cfg.Package, open)), driver.ClassQuarantined)
	}
	overdue := entry.Overdue > overdueMargin
	if entry.Supersedes(m) && (entry.Replays == m.Replays || overdue) { // it continues with the attempt of its retry
		later := *m
		later.Replays, later.Attempt = entry.Replays, entry.Attempt
		if entry.Attempt > t.cfg.Retry.MaxAttempts { // some failures were recoverable; the ledger does not record which
			later.Recovered = entry.Attempt - 1
		}
		m = &later
	}
	if open > 0 {
		return m, &outcome{kind: mustRunAlone}, nil
	}
	return m, nil, nil
}

// overdueMargin is how long after its due time a retry counts as lost. If the retry is only late, the message
// continues with the retry's attempt number, and the retry is outdated when it arrives.
const overdueMargin = 5 * time.Minute

// outdated reports whether a newer copy than m is stored elsewhere. There are three exceptions. The retry of
// an ordered message was in the memory of a process that has ended. If a move also settles the original and
// the original is redelivered, a failover or crash of the server has undone both. A copy that is long overdue
// counts as lost: for example, its queue was purged, and the sender sent the message again.
func (t *tracker) outdated(entry driver.LedgerEntry, m *inbox.Message) bool {
	if t.cfg.traits.MoveSettles || !entry.Supersedes(m) || entry.Overdue > overdueMargin {
		return false
	}
	return !t.cfg.Ordered || entry.Replays != m.Replays
}

// start records that a run starts.
func (t *tracker) start(m *inbox.Message) error {
	if err := t.note(func(ctx context.Context, l driver.Ledger) error { return l.Start(ctx, m) }); err != nil {
		return inbox.Unavailable(err)
	}
	t.open.Store(m, true)
	return nil
}

// end records the end of a run that the process has survived. A failed message may stay here for ever, if no
// destination accepts its copy.
func (t *tracker) end(m *inbox.Message, succeeded bool) {
	t.open.Delete(m)
	if succeeded {
		t.missing(m, t.note(func(ctx context.Context, l driver.Ledger) error { return l.Forget(ctx, m.ID) }))
		return
	}
	t.survived(m)
}

// moved records that a copy of a failed message is stored, before its original is settled.
func (t *tracker) moved(m *inbox.Message, o *outcome) {
	if t.cfg.ledger == nil || o == nil || m.Validate() != nil {
		return
	}
	t.missing(m, t.note(func(ctx context.Context, l driver.Ledger) error {
		switch {
		case o.failure.Class == driver.ClassQuarantined: // the entry prevents runs of redelivered copies
			return nil
		case o.decision.Action == driver.ActionRetry && o.decision.Counted:
			return l.Pass(ctx, m, o.decision.Delay)
		case o.decision.Action == driver.ActionDead && (t.cfg.Ordered || t.cfg.tracks(m)):
			return l.Forget(ctx, m.ID)
		}
		return nil
	}))
}

// abandoned records that the messages of abandoned handlers have not ended the process.
func (t *tracker) abandoned() {
	var all sync.WaitGroup
	t.open.Range(func(key, _ any) bool {
		all.Go(func() { t.survived(key.(*inbox.Message)) })
		return true
	})
	all.Wait()
}

// survived records that a run has not ended the process.
func (t *tracker) survived(m *inbox.Message) {
	t.missing(m, t.note(func(ctx context.Context, l driver.Ledger) error { return l.End(ctx, m) }))
}

// missing logs that an entry was not written: the message may run once more than it should.
func (t *tracker) missing(m *inbox.Message, err error) {
	if err != nil {
		t.cfg.Logger.Warn("could not record attempt", slog.Any("message_id", m.ID), slog.Any("error", err))
	}
}

// note calls the ledger, even during a drain.
func (t *tracker) note(call func(ctx context.Context, l driver.Ledger) error) error {
	ctx, cancel := context.WithTimeout(t.work, t.cfg.Timeout)
	defer cancel()
	return call(ctx, t.cfg.ledger)
}

// memoryInterval is the interval of memory measurements.
const memoryInterval = time.Second

// watchLimits returns when ctx ends, or when it has posted that a time or memory limit is reached.
func watchLimits(ctx context.Context, cfg *settings, post func(event)) {
	var timeUp, measure <-chan time.Time
	if cfg.TimeLimit > 0 {
		timer := time.NewTimer(cfg.TimeLimit)
		defer timer.Stop()
		timeUp = timer.C
	}
	if cfg.MemoryLimit > 0 {
		ticker := time.NewTicker(memoryInterval)
		defer ticker.Stop()
		measure = ticker.C
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-timeUp:
			post(event{kind: mustEnd, limit: "TimeLimit"})
			return
		case <-measure:
			if runloop.MemoryInUse() > cfg.MemoryLimit {
				post(event{kind: mustEnd, limit: "MemoryLimit"})
				return
			}
		}
	}
}
