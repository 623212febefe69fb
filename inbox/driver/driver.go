// Package driver has what transports and deduplicating processors of inbox need and its users do
// not: how a failure is read and decided over, dead letters, and the ledger.
package driver

import (
	"context"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
)

// DefaultRetention is how long processed messages are remembered where nothing else is set.
const DefaultRetention = 8 * 24 * time.Hour

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
type Pause struct {
	By, Reason string
	Since      time.Time
}

// Parker is an optional interface of an inbox.Processor that can stop ordering keys; see
// inbox.ConsumerConfig.ParkKeys. The processor keeps the dead letter that stopped a key, stores each later message of
// the key behind it, and processes these when the letter is returned or dropped. It does so while Background runs.
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
