package inboxamqp

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// soloPatience is how long a suspect waits for the other messages to end, and then runs alone.
const soloPatience = 30 * time.Second

// tracks reports whether a message's runs are noted in the ledger: not at its first
// delivery, so that what goes well pays nothing.
func (r *run) tracks(d *delivery) bool {
	return r.c.cfg.ledger != nil && (d.raw.Redelivered || d.msg.Attempt > 1 || d.msg.Replays > 0) && d.msg.Validate() == nil
}

// tracked has a message processed with the help of the ledger.
func (r *run) tracked(d *delivery) {
	entry, err := r.look(d.msg)
	open := entry.OpenRuns(d.msg)
	switch {
	case err != nil:
		r.conclude(d, inbox.Unavailable(err))
		return
	case entry.Supersedes(d.msg):
		r.c.cfg.Logger.Info("leftover of an earlier attempt dropped", slog.Any("message_id", d.msg.ID), slog.Int("attempt", d.msg.Attempt))
		d.report(probed{available: true})
		d.acknowledge(superseded)
		return
	case open >= r.c.cfg.MaxCrashes && d.raw.Redelivered: // else the runs may be those of other copies, in progress
		r.conclude(d, inbox.Classed(inbox.Unrecoverable(fmt.Errorf(
			"inboxamqp: the process ended %d times while this message was being processed", open)), driver.ClassQuarantined))
		return
	}
	// The turn is over before the message is settled: that may wait for the broker.
	err = errExited
	defer func() { r.conclude(d, err) }()
	err = r.watched(d, open > 0)
}

// watched runs a message in its turn, its beginning and, unless it went well, its end noted.
func (r *run) watched(d *delivery, suspect bool) error {
	if suspect {
		defer r.turns.alone(soloPatience)()
	} else {
		defer r.turns.share()()
	}
	if err := r.note(func(ctx context.Context, l driver.Ledger, name string) error { return l.Start(ctx, name, d.msg) }); err != nil {
		return inbox.Unavailable(err)
	}
	r.inHand.Store(d, true)
	results := []error{errExited}
	defer func() {
		r.inHand.Delete(d)
		if results[0] != nil { // it may never leave, where no queue takes its copy
			r.survived(d)
		}
	}()
	r.process([]*delivery{d}, results)
	return results[0]
}

// survived notes that a run has not ended the process.
func (r *run) survived(d *delivery) {
	r.missing(d, r.note(func(ctx context.Context, l driver.Ledger, name string) error { return l.End(ctx, name, d.msg) }))
}

// missing tells of a note that was not made: the message may run once more than it should.
func (r *run) missing(d *delivery, err error) {
	if err != nil {
		r.c.cfg.Logger.Warn("attempt not noted", slog.Any("message_id", d.msg.ID), slog.Any("error", err))
	}
}

func (r *run) look(m *inbox.Message) (entry driver.LedgerEntry, err error) {
	err = r.note(func(ctx context.Context, l driver.Ledger, name string) (err error) {
		entry, err = l.Look(ctx, name, m.ID)
		return err
	})
	return entry, err
}

// note calls the ledger, also while draining.
func (r *run) note(call func(ctx context.Context, l driver.Ledger, name string) error) error {
	ctx, cancel := context.WithTimeout(r.finished, r.c.cfg.Timeout)
	defer cancel()
	return call(ctx, r.c.cfg.ledger, r.c.cfg.Name)
}

// concluded notes in the ledger how a message left, before its original is settled.
func (r *run) concluded(d *delivery, f driver.Failure, decision driver.Decision) {
	if r.c.cfg.ledger == nil || d.msg.Validate() != nil {
		return
	}
	r.missing(d, r.note(func(ctx context.Context, l driver.Ledger, name string) error {
		switch {
		case f.Class == driver.ClassQuarantined: // the entry keeps what comes again from running
			return nil
		case decision.Action == driver.ActionRetry && decision.Counted:
			return l.Pass(ctx, name, d.msg)
		case r.tracks(d) && (f.Err == nil || decision.Action == driver.ActionDead):
			return l.Forget(ctx, name, d.msg.ID)
		}
		return nil
	}))
}

// spare notes for messages whose handlers are left behind that it was not they who ended
// the process.
func (r *run) spare() {
	var all sync.WaitGroup
	r.inHand.Range(func(key, _ any) bool {
		all.Go(func() { r.survived(key.(*delivery)) })
		return true
	})
	all.Wait()
}
