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
