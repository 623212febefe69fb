package driver

import (
	"context"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
)

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
