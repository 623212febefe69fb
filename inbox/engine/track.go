package engine

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// tracker notes in the ledger what became of messages that did not go well at their first delivery.
// Workers and the mover use it.
type tracker struct {
	cfg  *settings
	work context.Context // ends with the run: notes are made while draining, too
	open sync.Map        // messages whose run is open in the ledger
}

// look reads what is noted of a message, and decides whether it may run. It returns the message as
// it is to be processed, or what became of it: its failure, or that it is a leftover, or that it
// must run alone.
func (t *tracker) look(m *inbox.Message, alone bool) (*inbox.Message, *fate, error) {
	var entry driver.LedgerEntry
	err := t.note(func(ctx context.Context, l driver.Ledger) (err error) {
		entry, err = l.Look(ctx, m.ID)
		return err
	})
	open := entry.OpenRuns(m)
	switch {
	case err != nil:
		return m, nil, inbox.Unavailable(err)
	case t.isLeftover(entry, m):
		t.cfg.Logger.Info("leftover of an earlier attempt dropped", slog.Any("message_id", m.ID), slog.Int("attempt", m.Attempt))
		return m, &fate{kind: leftover}, nil
	case open >= t.cfg.MaxCrashes && m.Redelivered: // else the runs may be those of other copies, in progress
		return m, nil, inbox.Classed(inbox.Unrecoverable(fmt.Errorf(
			"%s: the process ended %d times while this message was being processed", t.cfg.Package, open)), driver.ClassQuarantined)
	}
	overdue := entry.Overdue > overdueMargin
	if entry.Supersedes(m) && (entry.Replays == m.Replays || overdue) { // it goes on where its retry would have
		later := *m
		later.Replays, later.Attempt = entry.Replays, entry.Attempt
		if entry.Attempt > t.cfg.Retry.MaxAttempts { // some failures were recoverable; the ledger does not tell which
			later.Recovered = entry.Attempt - 1
		}
		m = &later
	}
	if open > 0 && !alone {
		return m, &fate{kind: suspect}, nil
	}
	return m, nil, nil
}

// overdueMargin is how long after its time a retry counts as lost. Should it only be late, the message goes on
// with that retry's number all the same, and the retry then counts as its leftover.
const overdueMargin = 5 * time.Minute

// isLeftover reports whether a newer copy than m is stored elsewhere. The retry of an ordered message is
// not: it was in the hand of a process that is gone. Neither is a copy whose move also ended the
// original, as long as that comes again: a failover or a crash of the server has undone both. A copy that is
// long overdue counts as lost: its queue was purged, for example, and the sender sent the message again.
func (t *tracker) isLeftover(entry driver.LedgerEntry, m *inbox.Message) bool {
	if t.cfg.traits.MoveSettles || !entry.Supersedes(m) || entry.Overdue > overdueMargin {
		return false
	}
	return !t.cfg.Ordered || entry.Replays != m.Replays
}

// start notes that a run begins.
func (t *tracker) start(m *inbox.Message) error {
	if err := t.note(func(ctx context.Context, l driver.Ledger) error { return l.Start(ctx, m) }); err != nil {
		return inbox.Unavailable(err)
	}
	t.open.Store(m, true)
	return nil
}

// end notes how a run has ended that the process has survived. The message may never leave, where no
// place takes its copy.
func (t *tracker) end(m *inbox.Message, passed bool) {
	t.open.Delete(m)
	if passed {
		t.missing(m, t.note(func(ctx context.Context, l driver.Ledger) error { return l.Forget(ctx, m.ID) }))
		return
	}
	t.survived(m)
}

// moved notes that a failed message has left, before its original is settled.
func (t *tracker) moved(m *inbox.Message, f *fate) {
	if t.cfg.ledger == nil || f == nil || m.Validate() != nil {
		return
	}
	t.missing(m, t.note(func(ctx context.Context, l driver.Ledger) error {
		switch {
		case f.failure.Class == driver.ClassQuarantined: // the entry keeps what comes again from running
			return nil
		case f.decision.Action == driver.ActionRetry && f.decision.Counted:
			return l.Pass(ctx, m, f.decision.Delay)
		case f.decision.Action == driver.ActionDead && (t.cfg.Ordered || t.cfg.tracks(m)):
			return l.Forget(ctx, m.ID)
		}
		return nil
	}))
}

// abandoned notes for messages whose handlers are left behind that it was not they who ended the
// process.
func (t *tracker) abandoned() {
	var all sync.WaitGroup
	t.open.Range(func(key, _ any) bool {
		all.Go(func() { t.survived(key.(*inbox.Message)) })
		return true
	})
	all.Wait()
}

// survived notes that a run has not ended the process.
func (t *tracker) survived(m *inbox.Message) {
	t.missing(m, t.note(func(ctx context.Context, l driver.Ledger) error { return l.End(ctx, m) }))
}

// missing logs that a note was not made: the message may run once more than it should.
func (t *tracker) missing(m *inbox.Message, err error) {
	if err != nil {
		t.cfg.Logger.Warn("attempt not noted", slog.Any("message_id", m.ID), slog.Any("error", err))
	}
}

// note calls the ledger, also while draining.
func (t *tracker) note(call func(ctx context.Context, l driver.Ledger) error) error {
	ctx, cancel := context.WithTimeout(t.work, t.cfg.Timeout)
	defer cancel()
	return call(ctx, t.cfg.ledger)
}
