package outbox

import (
	"time"

	"github.com/holdfast-go/holdfast/internal/deadletter"
)

var (
	// ErrNotFound means that no dead letter has the id.
	ErrNotFound = deadletter.ErrNotFound
	// ErrOutlived means that a replay left dead letters in place because they are older than the consumers' record of
	// processed messages. Replay.Force returns them too.
	ErrOutlived = deadletter.ErrOutlived
)

// An outbox and a consumer have the same types of dead letters. Package internal/deadletter describes their fields and
// methods.
type (
	// DeadLetters shows and moves the dead letters of relays. Get it from the store's DeadLetters method. The store's
	// method Parked returns the messages that wait for their first or next attempt, with the same methods.
	//
	//	List(ctx, Filter) ([]DeadLetter, error)
	//	Show(ctx, id uuid.UUID) (DeadLetter, error)
	//	Count(ctx, Filter) (int, error)
	//	Groups(ctx, Filter) ([]Group, error)
	//	Replay(ctx, Filter, Replay) (Replayed, error)
	//	Remove(ctx, Filter, Removal) (int, error)
	DeadLetters = deadletter.DeadLetters[Message]
	// DeadLetter is a message that a relay gave up.
	// It has the fields Message, Class, Error, ErrorType, SQLState, Fingerprint, Attempts, CreatedAt, FirstFailedAt,
	// FailedAt, DueAt, Consumer, Omitted, Unreadable and Cursor; go doc
	// github.com/holdfast-go/holdfast/internal/deadletter.DeadLetter describes them.
	DeadLetter = deadletter.DeadLetter[Message]
	// Group is a set of dead letters of one kind.
	// It has the fields Fingerprint, Count, First, Last and Sample.
	Group = deadletter.Group[Message]
	// Filter selects dead letters.
	// It has the fields IDs, Class, Name, Key, Fingerprint, ErrorContains, FailedAfter, FailedBefore, Limit, After and
	// Whole.
	Filter = deadletter.Filter
	// Replay holds the arguments of DeadLetters.Replay: who returns dead letters to the outbox, and how.
	// It has the fields By, Reason, PerSecond, Delay, DryRun, Progress, Edit and Force.
	Replay = deadletter.Replay[Message]
	// Removal holds the arguments of DeadLetters.Remove: who deletes dead letters, and why.
	// It has the fields By, Reason and Progress.
	Removal = deadletter.Removal
	// Replayed is the result of DeadLetters.Replay.
	// It has the fields Returned, Outlived and Failed.
	Replayed = deadletter.Replayed
)

// Waiting is an unpublished message in an outbox that is ready, or behind a parked message of its key. A store's method
// Waiting lists them, without their bodies.
type Waiting struct {
	Message
	// CreatedAt is the time when it was stored, by the store's clock.
	CreatedAt time.Time
	// Attempts counts the failed attempts. Class and Error describe the last failure.
	Attempts     int
	Class, Error string
	// Unreadable is the reason why the message is incomplete, as in DeadLetter.
	Unreadable error
	// Cursor is the position of the message in the list. Used as WaitingFilter.After, it starts a list after this
	// position, even if the message is gone. Only the store can read it.
	Cursor string
}

// WaitingFilter selects the waiting messages of an outbox that match every field that is set. A list has them in stored
// order.
type WaitingFilter struct {
	// Name and Key select by equality. Optional.
	Name, Key string
	// Limit is the maximum number of messages. Default: 100.
	Limit int
	// After is the Cursor of a message: the list starts after it. Optional. A message that is committed
	// between two pages may lie before the position; a list from the start shows it.
	After string
}
