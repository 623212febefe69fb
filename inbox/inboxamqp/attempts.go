package inboxamqp

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// soloPatience is how long a suspect waits for the other messages to end, and then runs alone.
const soloPatience = 30 * time.Second

// attempts notes in the ledger what became of messages that did not go well at their first
// delivery, and has those run alone during which the process has ended. Without a ledger it notes
// nothing.
type attempts struct {
	cfg   *settings
	life  *lifetime
	turns *turns
	open  sync.Map // messages whose run is open in the ledger
}

// tracks reports whether a message's runs are noted in the ledger: not at its first
// delivery, so that what goes well pays nothing.
func (a *attempts) tracks(d *delivery) bool {
	return a.cfg.ledger != nil && (d.msg.Redelivered || d.msg.Attempt > 1 || d.msg.Replays > 0) && d.msg.Validate() == nil
}

// look returns what is noted of a message.
func (a *attempts) look(m *inbox.Message) (entry driver.LedgerEntry, err error) {
	err = a.note(func(ctx context.Context, l driver.Ledger) (err error) {
		entry, err = l.Look(ctx, m.ID)
		return err
	})
	return entry, err
}

// run has a message processed in its turn, its beginning and, unless it went well, its end noted.
func (a *attempts) run(d *delivery, suspect bool, process func(results []error)) error {
	if suspect {
		defer a.turns.alone(soloPatience)()
	} else {
		defer a.turns.share()()
	}
	if err := a.note(func(ctx context.Context, l driver.Ledger) error { return l.Start(ctx, d.msg) }); err != nil {
		return inbox.Unavailable(err)
	}
	a.open.Store(d.msg, true)
	results := []error{errExited}
	defer func() {
		a.open.Delete(d.msg)
		if results[0] != nil { // it may never leave, where no queue takes its copy
			a.survived(d.msg)
		}
	}()
	process(results)
	return results[0]
}

// concluded notes how a message left, before its original is settled.
func (a *attempts) concluded(d *delivery, f driver.Failure, decision driver.Decision) {
	if a.cfg.ledger == nil || d.msg.Validate() != nil {
		return
	}
	a.missing(d.msg, a.note(func(ctx context.Context, l driver.Ledger) error {
		switch {
		case f.Class == driver.ClassQuarantined: // the entry keeps what comes again from running
			return nil
		case decision.Action == driver.ActionRetry && decision.Counted:
			return l.Pass(ctx, d.msg)
		case a.tracks(d) && (f.Err == nil || decision.Action == driver.ActionDead):
			return l.Forget(ctx, d.msg.ID)
		}
		return nil
	}))
}

// spare notes for messages whose handlers are left behind that it was not they who ended
// the process.
func (a *attempts) spare() {
	var all sync.WaitGroup
	a.open.Range(func(key, _ any) bool {
		all.Go(func() { a.survived(key.(*inbox.Message)) })
		return true
	})
	all.Wait()
}

// survived notes that a run has not ended the process.
func (a *attempts) survived(m *inbox.Message) {
	a.missing(m, a.note(func(ctx context.Context, l driver.Ledger) error { return l.End(ctx, m) }))
}

// missing logs that a note was not made: the message may run once more than it should.
func (a *attempts) missing(m *inbox.Message, err error) {
	if err != nil {
		a.cfg.Logger.Warn("attempt not noted", slog.Any("message_id", m.ID), slog.Any("error", err))
	}
}

// note calls the ledger, also while draining.
func (a *attempts) note(call func(ctx context.Context, l driver.Ledger) error) error {
	ctx, cancel := context.WithTimeout(a.life.finished, a.cfg.Timeout)
	defer cancel()
	return call(ctx, a.cfg.ledger)
}
