// Package driver has what transports and deduplicating processors of inbox need and its users do
// not: how a failure is read and decided over, dead letters, and the ledger.
package driver

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/internal/base"
	"github.com/holdfast-go/holdfast/internal/actor"
	"github.com/holdfast-go/holdfast/internal/deadletter"
)

// DefaultRetention is how long processed messages are remembered where nothing else is set.
const DefaultRetention = deadletter.Retention

// Background is an optional interface of an inbox.Processor: work of its own, such as pruning. A
// consumer's Run starts it once and waits for its end.
type Background interface {
	// Background works until ctx ends. It logs what fails and repeats it later.
	Background(ctx context.Context)
}

// Deduplicator is an optional interface of an inbox.Processor that remembers which messages it
// has processed.
type Deduplicator interface {
	inbox.Processor
	// Ledger is where the consumer notes what became of messages; nil when there is none.
	Ledger() Ledger
	// Retention is how long processed messages are remembered.
	Retention() time.Duration
}

// Configured is an optional interface of an inbox.Processor whose settings name its handlers.
type Configured interface {
	// Configured returns what is wrong with the settings now that all handlers are registered. A consumer's Run asks
	// once, and returns the error.
	Configured() error
}

// Limiter is an optional interface of an inbox.Processor whose handlers have limits of their own.
type Limiter interface {
	// Limit returns how many messages of a name may be processed at once, together with others of
	// that name in one batch counted once; 0: any number. It is called for every message, from many
	// goroutines, and neither blocks nor changes its answer.
	Limit(name string) int
}

// Pausable is an optional interface of an inbox.Processor that operators can pause.
type Pausable interface {
	// Pause keeps all consumers on the processor, in all processes, from beginning another message until
	// Resume; they learn of it within a few seconds. What they have begun ends. By is who pauses, 1 to 128 bytes,
	// and reason why, 1,000 at most; neither has control characters. A pause that is there gets both, and keeps
	// its begin.
	Pause(ctx context.Context, by, reason string) error
	// Resume ends the pause. It is no error that there is none.
	Resume(ctx context.Context) error
	// Paused returns the pause.
	Paused(ctx context.Context) (Pause, error)
	// WatchPause tells the pause as soon as it can, and again when it has changed, until ctx ends. It tells the
	// zero Pause where it cannot know: what keeps it from that keeps the messages from being processed, too.
	WatchPause(ctx context.Context, tell func(Pause))
}

// Pause says who has paused something, why and when. The zero value: it is not paused.
type Pause = actor.Pause

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

// ParkerOf returns the Parker of a processor where ConsumerConfig.ParkKeys asks for it; nil where there is none.
func ParkerOf(p inbox.Processor, cfg inbox.ConsumerConfig) Parker {
	parker, ok := p.(Parker)
	if !ok || !cfg.ParkKeys || parker.Parked() == nil {
		return nil
	}
	return parker
}

// ParkedBy returns the dead letters that stopped their keys; nil where keys are not stopped.
func ParkedBy(p inbox.Processor, cfg inbox.ConsumerConfig) DeadLetters {
	if parker := ParkerOf(p, cfg); parker != nil {
		return parker.Parked()
	}
	return nil
}

// Decode reads the JSON body of a message. It unpacks content encoding gzip and skips a byte order mark. It refuses a content type other than JSON, a
// body over MaxBodyBytes packed or unpacked, anything but exactly one JSON value, and null; members that T
// does not know are passed over, so that senders may add some. Errors are of class ClassValidation.
func Decode[T any](m *inbox.Message) (T, error) {
	var v T
	if err := base.Decode(m.ContentType, m.ContentEncoding, m.Body, &v); err != nil {
		var zero T
		return zero, inbox.Invalid(fmt.Errorf("inbox: decode %T: %w", v, err))
	}
	return v, nil
}

// Ledger keeps, outside the handlers' transactions, what became of messages that did not go
// through at their first delivery. A consumer uses it for two things that a message's own
// headers cannot tell: that a delivery is the leftover of an attempt whose retry is already
// on its way, and that the process ended while the message was being processed.
//
// A Ledger belongs to one consumer and keeps an entry per message id. inboxpgx keeps them in
// Postgres, inboxtest in memory; the suite is in inboxtest/conformance. It must be safe for
// concurrent use.
type Ledger interface {
	// Look returns what is noted of a message; the zero LedgerEntry when nothing is.
	Look(ctx context.Context, id uuid.UUID) (LedgerEntry, error)
	// Start notes that a run of the message begins. For a message with more Replays than
	// those noted the entry begins anew.
	Start(ctx context.Context, m *inbox.Message) error
	// End notes that the process has survived the run: no run is open any more.
	End(ctx context.Context, m *inbox.Message) error
	// Pass is End for an attempt whose retry is stored elsewhere and due after a time: what comes with
	// this Attempt, or one before it, is superseded from now on.
	Pass(ctx context.Context, m *inbox.Message, after time.Duration) error
	// Forget drops the entry.
	Forget(ctx context.Context, id uuid.UUID) error
}

// LedgerEntry is what a Ledger has noted of a message.
type LedgerEntry struct {
	// Replays and Attempt are those of the newest copy that is known of.
	Replays, Attempt int
	// Open is how many runs have begun since one was survived.
	Open int
	// Overdue is how long ago that copy was due, or began to run, by the clock of the ledger. 0: it is not due yet.
	Overdue time.Duration
}

// Supersedes reports whether a newer copy than m is known of. Then m is a leftover, unless the newer copy is long
// overdue, or Traits.MoveSettles is set: the server has lost the newer copy there.
func (e LedgerEntry) Supersedes(m *inbox.Message) bool {
	if e.Replays != m.Replays {
		return e.Replays > m.Replays
	}
	return e.Attempt > max(m.Attempt, 1)
}

// OpenRuns returns how many runs of m the process has not survived. A replay begins at 0.
func (e LedgerEntry) OpenRuns(m *inbox.Message) int {
	if e.Replays < m.Replays {
		return 0
	}
	return e.Open
}
