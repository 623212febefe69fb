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

// Checker is an optional interface of an inbox.Processor: a consumer's Check joins its findings.
type Checker interface {
	Check(ctx context.Context) error
}

// Healthy is an optional interface of an inbox.Processor. A consumer asks it every 5 seconds, and
// before anything is consumed, and tries no message while it returns an error.
type Healthy interface {
	// Healthy returns an error when what the processor needs is down.
	Healthy(ctx context.Context) error
}
