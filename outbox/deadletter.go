package outbox

import (
	"time"

	"github.com/holdfast-go/holdfast/internal/deadletter"
)

var (
	// ErrNotFound means that there is no dead letter with the id.
	ErrNotFound = deadletter.ErrNotFound
	// ErrOutlived means that a replay left dead letters where they are because no consumer remembers any more whether it has
	// processed them. Replay.Force returns them too.
	ErrOutlived = deadletter.ErrOutlived
)

// DeadLetters, and what its methods take and return, are the same for an outbox and for a consumer.
type (
	// DeadLetters shows and moves the messages that relays gave up. A store has a method that returns its own.
	DeadLetters = deadletter.DeadLetters[Message]
	// DeadLetter is a message that a relay gave up.
	DeadLetter = deadletter.DeadLetter[Message]
	// Group are dead letters of one kind.
	Group = deadletter.Group[Message]
	// Filter selects dead letters.
	Filter = deadletter.Filter
	// Replay says who returns dead letters to the outbox, and how.
	Replay = deadletter.Replay[Message]
	// Removal says who deletes dead letters.
	Removal = deadletter.Removal
	// Replayed is what became of the dead letters that a replay selected.
	Replayed = deadletter.Replayed
)

// Waiting is a message that an outbox holds and that is not published. Stores have a method Waiting
// that lists them.
type Waiting struct {
	Message
	// CreatedAt is when it was stored, and DueAt when its attempt is due, both by the store's clock. A
	// zero DueAt: it is ready, or follows the one before it in its key.
	CreatedAt, DueAt time.Time
	// Attempts counts those that failed; Class and Error say what the last one met.
	Attempts     int
	Class, Error string
	// Unreadable is as in DeadLetter.
	Unreadable error
	// Cursor is where the message is in the list of those that are parked, or of the others: as
	// WaitingFilter.After of the same list it has that begin behind it, also when the message is gone.
	// Only the store can read it.
	Cursor string
}

// WaitingFilter selects messages of an outbox: those that match every field that is set.
type WaitingFilter struct {
	// Parked selects those that wait for their first or their next attempt, by the time when they are
	// due. Otherwise those are selected that are ready, and those that follow a parked one of their key, as
	// they were stored.
	Parked bool
	// Name and Key select what equals them. Optional.
	Name, Key string
	// Limit is the most messages. Default: 100.
	Limit int
	// After is the Cursor of a message: the list begins behind it. Optional. A message that is committed, or
	// parked, while one pages may lie before the place that is reached: a list that begins again shows it.
	After string
}
