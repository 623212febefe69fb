// Package driver is for transports and deduplicating processors of inbox. It classifies failures, decides
// about retries, and defines dead letters and the ledger. Users of inbox do not need it.
package driver

import (
	"context"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/actor"
	"github.com/holdfast-go/holdfast/internal/deadletter"
)

// DefaultRetention is the default time for which entries of processed messages are kept.
const DefaultRetention = deadletter.Retention

// Background is an optional interface of an inbox.Processor with work of its own, such as pruning. A
// consumer's Run starts it once and waits until it returns.
type Background interface {
	// Background works until ctx ends. It logs failures and tries again later.
	Background(ctx context.Context)
}

// Deduplicator is an optional interface of an inbox.Processor that keeps entries of processed messages.
type Deduplicator interface {
	inbox.Processor
	// Ledger returns the ledger for the consumer's notes about messages; nil if there is none.
	Ledger() Ledger
	// Retention returns the time for which entries of processed messages are kept.
	Retention() time.Duration
}

// Configured is an optional interface of an inbox.Processor with settings per handler.
type Configured interface {
	// Configured returns an error if a setting names a handler that is not registered. A consumer's Run calls
	// it once, after all handlers are registered, and returns the error.
	Configured() error
}

// Limiter is an optional interface of an inbox.Processor whose handlers have limits of their own.
type Limiter interface {
	// Limit returns how many messages of a name may be processed at once; 0 means any number. The messages of
	// one name in a batch count as one. It is called for every message, from many goroutines. It must not
	// block, and must always return the same value.
	Limit(name string) int
}

// Pausable is an optional interface of an inbox.Processor that operators can pause.
type Pausable interface {
	// Pause keeps all consumers on the processor, in all processes, from starting another message until
	// Resume. They notice it within a few seconds. Messages that have started finish. By is the person, 1 to
	// 128 bytes, and reason the cause, at most 1,000 bytes; neither may have control characters. An existing
	// pause gets the new by and reason, and keeps its start.
	Pause(ctx context.Context, by, reason string) error
	// Resume ends the pause. It is not an error if there is none.
	Resume(ctx context.Context) error
	// Paused returns the pause.
	Paused(ctx context.Context) (Pause, error)
	// WatchPause calls tell with the pause as soon as it can, and again after each change, until ctx ends. If
	// it cannot read the pause, it calls tell with the zero Pause: the same fault also prevents the messages
	// from being processed.
	WatchPause(ctx context.Context, tell func(Pause))
}

// Pause records who paused something, why and when. The zero value means not paused.
type Pause = actor.Pause

// Counts are the numbers of deliveries that one process has settled since it created its consumer.
type Counts struct {
	// Done were processed. Failed failed, and became retries or dead letters; Retried is the number of the retries.
	Done, Failed, Retried int64
}

// Running is a message in work in one process.
type Running struct {
	// Consumer is the name of the consumer.
	Consumer string
	// The message has this ID, Name, Key and Attempt. Its handler is registered under Name.
	ID      uuid.UUID
	Name    string
	Key     string
	Attempt int
	// Since is when it was given to a worker, and Until when the context of its handler ends.
	Since, Until time.Time
}

// Parker is an optional interface of an inbox.Processor that can stop ordering keys; see
// inbox.ConsumerConfig.ParkKeys. The processor keeps the dead letter that stopped a key, stores each later message of
// the key behind it, and processes these when the dead letter is returned or dropped. It does so while Background runs.
type Parker interface {
	// Park gives the processor the settings of one of its consumers, with their defaults. The consumer calls it
	// before it runs.
	Park(cfg inbox.ConsumerConfig)
	// Parked returns the dead letters that stopped their keys; nil if the processor cannot stop keys. Return makes one
	// a message again in its place, with Attempt 1 and Replays one higher.
	Parked() DeadLetters
	// Stop keeps a dead letter, which stops its ordering key. It is durable when Stop returns nil, and the consumer then
	// acknowledges the message. If another dead letter has stopped the key, the message waits behind it. If the
	// message is kept already, or was processed by another copy, Stop changes nothing. It bounds its own time.
	Stop(ctx context.Context, dead inbox.DeadLetter) error
}

// ParkerOf returns the Parker of a processor if ConsumerConfig.ParkKeys is set; nil if there is none.
func ParkerOf(p inbox.Processor, cfg inbox.ConsumerConfig) Parker {
	parker, ok := p.(Parker)
	if !ok || !cfg.ParkKeys || parker.Parked() == nil {
		return nil
	}
	return parker
}

// ParkedBy returns the dead letters that stopped their keys; nil if keys are not stopped.
func ParkedBy(p inbox.Processor, cfg inbox.ConsumerConfig) DeadLetters {
	if parker := ParkerOf(p, cfg); parker != nil {
		return parker.Parked()
	}
	return nil
}

// Ledger records, outside the handlers' transactions, the attempts of messages that failed at their first
// delivery. A message's headers cannot show two things that a consumer reads from the ledger: whether a
// delivery is an extra copy of an attempt whose retry is already stored, and whether the process ended while
// it ran the message.
//
// A Ledger belongs to one consumer and keeps an entry per message id. inboxpgx keeps entries in Postgres,
// inboxtest in memory; the suite is in inboxtest/conformance. It must be safe for concurrent use.
type Ledger interface {
	// Look returns the entry of a message; the zero LedgerEntry if there is none.
	Look(ctx context.Context, id uuid.UUID) (LedgerEntry, error)
	// Start records that a run of the message starts. If the message has more Replays than the entry, the
	// entry is reset.
	Start(ctx context.Context, m *inbox.Message) error
	// End records that the process survived the run: no run is open any more.
	End(ctx context.Context, m *inbox.Message) error
	// Pass is End for an attempt whose retry is stored elsewhere and due after the given time. From then on,
	// copies with this Attempt or an earlier one are superseded.
	Pass(ctx context.Context, m *inbox.Message, after time.Duration) error
	// Forget deletes the entry.
	Forget(ctx context.Context, id uuid.UUID) error
}

// LedgerEntry is the entry of a message in a Ledger.
type LedgerEntry struct {
	// Replays and Attempt are the counts of the newest known copy.
	Replays, Attempt int
	// Open is how many runs have started since the process last survived one.
	Open int
	// Overdue is how long ago the newest copy was due, or started to run, by the clock of the ledger. 0 means
	// not due yet.
	Overdue time.Duration
}

// Supersedes reports whether a newer copy than m is known. Then m is an extra copy and is dropped, except in
// two cases: the newer copy is long overdue, or Traits.MoveSettles is set. In both the server has lost the
// newer copy.
func (e LedgerEntry) Supersedes(m *inbox.Message) bool {
	if e.Replays != m.Replays {
		return e.Replays > m.Replays
	}
	return e.Attempt > max(m.Attempt, 1)
}

// OpenRuns returns how many runs of m the process has not survived. A replay starts at 0.
func (e LedgerEntry) OpenRuns(m *inbox.Message) int {
	if e.Replays < m.Replays {
		return 0
	}
	return e.Open
}
