package engine

import (
	"errors"
	"log/slog"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/internal/base"
)

// returnPause is how long a message stays away that came back for no reason the consumer knows.
const returnPause = time.Second

// fate is what became of a message that did not simply go through.
type fate struct {
	kind     fateKind
	failure  driver.Failure
	decision driver.Decision
	at       time.Time
}

type fateKind uint8

const (
	hasFailed fateKind = iota + 1
	leftover           // a leftover: its retry was on its way already
	suspect            // it may have ended the process: it must run alone, and has not run yet
)

// order is where a message goes.
type order struct {
	target  driver.Target // 0: nowhere
	delay   time.Duration
	outcome outcome
	next    driver.Progress
	counted bool // the copy is the next attempt
	ran     bool // the message was processed, so that the ledger may know of the run
}

// toStop is the target of a dead letter that stops its key, besides the targets of the source.
const toStop driver.Target = -1

// judge reads a failure. Its error's methods are the handler's: it is no work for the loop.
func judge(cfg *settings, m *inbox.Message, err error, now time.Time) *fate {
	f := driver.Classify(err)
	d := driver.Decision{Action: f.Action}
	if !f.Unavailable {
		d = driver.Next(cfg.Retry, m, f, now, cfg.Rand())
	}
	return &fate{kind: hasFailed, failure: f, decision: d, at: now}
}

// own is the fate of a message that has failed by itself, although it looked like an outage.
func own(cfg *settings, m *inbox.Message, f *fate, now time.Time) *fate {
	failure := f.failure
	failure.Action, failure.Counted, failure.Unavailable = driver.ActionRetry, true, false
	return &fate{kind: hasFailed, failure: failure, decision: driver.Next(cfg.Retry, m, failure, now, cfg.Rand()), at: now}
}

// send is the order for a failed message. One that is to be given back, outside a drain, goes behind
// the others: it must neither make a hot loop nor keep them waiting.
func send(cfg *settings, m *inbox.Message, f *fate) order {
	switch f.decision.Action {
	case driver.ActionRetry:
		o := order{target: driver.ToLater, delay: f.decision.Delay, outcome: putOff, next: driver.Progressed(m, f.failure, f.decision, cfg.Name, f.at), ran: true}
		if f.decision.Counted {
			o.outcome, o.counted = retried, true
		}
		return o
	case driver.ActionDead:
		return order{target: driver.ToDead, outcome: dead, ran: true}
	}
	return away(m, returnPause)
}

// away has a message come again later, uncounted.
func away(m *inbox.Message, delay time.Duration) order {
	return order{target: driver.ToLater, delay: delay, outcome: displaced, next: unchanged(m)}
}

// unchanged is the progress of a message as it arrived.
func unchanged(m *inbox.Message) driver.Progress {
	return driver.Progress{Attempt: max(m.Attempt, 1), Recovered: m.Recovered, FirstFailedAt: m.FirstFailedAt, History: m.History}
}

// advance is the message as its next attempt, for one that waits in hand.
func advance(m *inbox.Message, next driver.Progress) *inbox.Message {
	later := *m
	later.Attempt, later.Recovered, later.FirstFailedAt, later.History = next.Attempt, next.Recovered, next.FirstFailedAt, next.History
	return &later
}

func logFailure(cfg *settings, m *inbox.Message, f *fate) {
	attrs := []any{
		"message_id", m.ID, "name", m.Name, "attempt", m.Attempt,
		"class", f.failure.Class, "action", f.decision.Action.String(), "error", f.failure.Err,
	}
	if m.Queue != cfg.Queue {
		attrs = append(attrs, slog.String("partition", m.Queue))
	}
	if f.decision.Action == driver.ActionRetry {
		attrs = append(attrs, "delay", f.decision.Delay)
	}
	if panicked, ok := errors.AsType[*base.Panic](f.failure.Err); ok {
		attrs = append(attrs, slog.String("stack", string(panicked.Stack)))
	}
	cfg.Logger.Warn("message not processed", attrs...)
}
